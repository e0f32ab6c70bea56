"""Widgets above a figure: live in JupyterLab, and wherever no kernel answers a slider over pictures, or one picture."""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import product
from zlib import crc32

import matplotlib
from IPython.display import display
from ipywidgets import HBox, Image, Label, Layout, ValueWidget, VBox
from jinja2 import Template
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.record import STYLE, in_256_colours, in_colours

DRAWING = "drawing …"
DPI, FRAME_DPI, FRAME_COLOURS = 90, 68, 48  # of the live picture; of those that a page without a kernel holds
# One slider for each name, over its values; the picture is that of all values together.
SLIDER = Template("""\
<div class="hilbert-slider" id="{{ own }}">
{%- for name, values in frames.items() %}
<label>{{ name | replace("_", " ") }}
 <input type="range" min="0" max="{{ values | length - 1 }}" value="{{ first[name] }}"
 data-size="{{ values | length }}"> <output>{{ values[first[name]] | e }}</output></label>
{%- endfor %}
<br><img src="data:image/png;base64,{{ pictures[shown] }}" alt="a figure that the sliders change">
</div>
<script>
(() => {
  const slider = document.getElementById("{{ own }}");
  const pictures = {{ pictures | tojson }};
  const values = {{ frames.values() | list | tojson }};
  const inputs = [...slider.querySelectorAll("input")];
  const outputs = [...slider.querySelectorAll("output")];
  const draw = () => {
    const number = inputs.reduce((all, input) => all * Number(input.dataset.size) + Number(input.value), 0);
    outputs.forEach((output, place) => { output.textContent = values[place][inputs[place].value]; });
    slider.querySelector("img").src = "data:image/png;base64," + pictures[number];
  };
  inputs.forEach(input => input.addEventListener("input", draw));
})();
</script>""")


def explore(
    draw: Callable[..., Figure],
    *,
    frames: Mapping[str, Sequence] | None = None,
    options: Mapping[str, Callable[[dict], Sequence]] | None = None,
    **controls: ValueWidget,
) -> None:
    """Show a figure under widgets that change it: `draw` takes their values by name.

    While a figure is drawn, a line beside the widgets says so; where `draw` refuses, the last one stays and the line
    says why. A widget without a description is labelled by its name.

    Args:
        draw: the figure of values, by the names of the controls.
        frames: values of some controls, whose product is drawn at once. Pages without a kernel show a slider over
            these pictures, with the first value of every other control.
        options: for a control with options, those that the values of the others leave. Whenever one of the others
            moves, the control takes the nearest option before its own.
        controls: a widget for each argument of `draw`.

    Raises:
        ValueError: for frames or options of a name that no control has.
    """
    frames, options = {name: list(values) for name, values in (frames or {}).items()}, dict(options or {})
    for argument, names in (("frames", frames), ("options", options)):
        if unknown := sorted(set(names) - set(controls)):
            raise ValueError(f"{argument} must name controls ({', '.join(controls)}), got {unknown[0]!r}")
    for name, control in controls.items():
        control.description = control.description or name.replace("_", " ")
        control.style.description_width = "initial"
        if control.has_trait("continuous_update"):
            control.continuous_update = False  # a figure where a slider is let go, not a queue of them on its way

    def values() -> dict:
        return {name: control.value for name, control in controls.items()}

    def redraw(change: dict) -> None:
        nonlocal is_adjusting
        if is_adjusting:  # its options change, which draws no figure of its own
            return
        is_adjusting = True
        _keep_allowed(controls, options, change["owner"])
        is_adjusting = False
        state.value = DRAWING
        try:
            picture.value = _png(draw, values(), DPI)
        except Exception as error:  # it would end in the kernel's log, where nobody looks
            state.value = f"{type(error).__name__}: {error}"
        else:
            state.value = ""

    is_adjusting = False
    state = Label()
    first = _png(draw, values(), DPI)
    picture = Image(value=first, format="png", layout=Layout(align_self="flex-start"))  # not stretched over the page
    for control in controls.values():
        control.observe(redraw, names="value")
    panel = VBox([HBox([*controls.values(), state], layout=Layout(flex_flow="row wrap")), picture])
    # The picture beside the view is what HTML shows, where the widgets have no kernel to ask.
    bundle = {**panel._repr_mimebundle_(), "image/png": b64encode(in_256_colours(first)).decode()}
    if frames:
        bundle["text/html"] = _slider(draw, values(), frames)
    display(bundle, raw=True)


def _keep_allowed(
    controls: Mapping[str, ValueWidget], options: Mapping[str, Callable[[dict], Sequence]], moved: ValueWidget
) -> None:
    # The one that was moved keeps its value, and its own options are those of the others.
    for name, allowed in options.items():
        control = controls[name]
        left = list(allowed({other: widget.value for other, widget in controls.items() if other != name}))
        value = control.value
        if control is not moved or value not in left:
            value = max((option for option in left if option <= value), default=left[0])
        control.options = left
        control.value = value


def _png(draw: Callable[..., Figure], values: Mapping, dpi: int) -> bytes:
    buffer = BytesIO()
    with matplotlib.rc_context(STYLE):
        draw(**values).savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _slider(draw: Callable[..., Figure], values: Mapping, frames: Mapping[str, Sequence]) -> str:
    pictures = []
    for chosen in product(*frames.values()):
        png = _png(draw, {**values, **dict(zip(frames, chosen, strict=True))}, FRAME_DPI)
        pictures.append(b64encode(in_colours(png, FRAME_COLOURS)).decode())
    places = {name: list(of_name).index(values[name]) for name, of_name in frames.items()}
    shown = 0
    for name, of_name in frames.items():
        shown = shown * len(of_name) + places[name]
    own = f"slider-{crc32(''.join(pictures).encode()):08x}"
    return SLIDER.render(own=own, frames=frames, first=places, pictures=pictures, shown=shown)
