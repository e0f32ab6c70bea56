"""Widgets above a figure: live in JupyterLab, and a still picture wherever no kernel answers."""

from base64 import b64encode
from collections.abc import Callable
from io import BytesIO

import matplotlib
from IPython.display import display
from ipywidgets import HBox, Image, Label, Layout, ValueWidget, VBox
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.record import STYLE, in_256_colours

DRAWING = "drawing …"


def explore(draw: Callable[..., Figure], **controls: ValueWidget) -> None:
    """Show a figure under widgets that change it: `draw` takes their values by name.

    While a figure is drawn, a line beside the widgets says so; where `draw` refuses, the last one stays and the line
    says why. A widget without a description is labelled by its name.
    """
    for name, control in controls.items():
        control.description = control.description or name.replace("_", " ")
        control.style.description_width = "initial"
        if control.has_trait("continuous_update"):
            control.continuous_update = False  # a figure where a slider is let go, not a queue of them on its way

    def png() -> bytes:
        buffer = BytesIO()
        with matplotlib.rc_context(STYLE):
            draw(**{name: control.value for name, control in controls.items()}).savefig(buffer, format="png", dpi=90)
        return buffer.getvalue()

    def redraw(_change: dict) -> None:
        state.value = DRAWING
        try:
            picture.value = png()
        except Exception as error:  # it would end in the kernel's log, where nobody looks
            state.value = f"{type(error).__name__}: {error}"
        else:
            state.value = ""

    state = Label()
    picture = Image(value=png(), format="png", layout=Layout(align_self="flex-start"))  # not stretched over the page
    for control in controls.values():
        control.observe(redraw, names="value")
    panel = VBox([HBox([*controls.values(), state], layout=Layout(flex_flow="row wrap")), picture])
    # The picture beside the view is what HTML shows, where the widgets have no kernel to ask.
    display({**panel._repr_mimebundle_(), "image/png": b64encode(in_256_colours(picture.value)).decode()}, raw=True)
