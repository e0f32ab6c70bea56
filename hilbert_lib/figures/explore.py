"""A slider above a figure: live in JupyterLab, and a still picture wherever no kernel answers."""

from base64 import b64encode
from collections.abc import Callable
from io import BytesIO

import matplotlib
from IPython.display import display
from ipywidgets import Image, IntSlider, VBox
from matplotlib.figure import Figure

from hilbert_lib.figures.record import STYLE


def explore(draw: Callable[[int], Figure], *, label: str, low: int, high: int, start: int) -> None:
    """Show a figure of one whole number under a slider that changes it.

    Args:
        draw: a pure function from the number to a figure.
        label: what the number is.
        low, high: its range, both ends included.
        start: where the slider stands at first.
    """

    def png(value: int) -> bytes:
        buffer = BytesIO()
        with matplotlib.rc_context(STYLE):
            draw(value).savefig(buffer, format="png", dpi=90)
        return buffer.getvalue()

    def redraw(change: dict) -> None:
        picture.value = png(change["new"])

    slider = IntSlider(start, low, high, description=label, continuous_update=False)
    picture = Image(value=png(start), format="png")
    slider.observe(redraw, names="value")
    # The picture beside the view is what HTML shows, where the slider has no kernel to ask.
    view = VBox([slider, picture])._repr_mimebundle_()
    display({**view, "image/png": b64encode(picture.value).decode()}, raw=True)
