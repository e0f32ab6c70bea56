"""Calls that came before: one look-up leads from a call to the launches of an earlier one of its form.

    form of a call   all that it hangs on: a key (`form_of`) of shapes and alignment, of the other arguments with their
         |           types, of modes of torch and of measured rules; and a check of q, k and v by one function of C++
         |  _calls   each (`internals.form_check`): strides, dtype, device, dispatch keys, gradient
         v
    KnownCall        request without tensors, backend, and for each direction the recording of its launches

    call of a form   arguments    function of the backend   launches
    first            validated    runs                      compiled
    second           looked up    runs                      recorded, where `tape` holds all that the function did
    third and later  looked up    -                         those of the recording, with the new addresses

Nothing here holds a tensor. A call has no form, and is validated each time, where somebody watches torch's operators or
where an argument is of a type that is not listed here. A recording starts nothing where Triton's hooks listen or a CUDA
graph is captured (`triton.start`): then the function of the backend runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention import failures, operators
from hilbert_lib.attention.autograd import Served, needs_gradient, run_forward, unwatched_backward
from hilbert_lib.attention.measured_rules import changed_lately, look_again
from hilbert_lib.attention.request import ARGUMENTS, TENSORS, Request, Tensors, tensors_of, without_tensors
from hilbert_lib.attention.tape import taped
from hilbert_lib.internals import form_check, is_below_autograd, is_thread_watched, plain_apply, plain_keys
from hilbert_lib.ordering import Ordering, in_sequence
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import PointNeighbourhood

MOST = 1024  # forms; all are forgotten where there are more
MOST_ALIKE = 16  # forms of one key: they differ in strides, devices or gradients
MOST_BACKWARDS = 8  # forms of what a backward is given, for one form of call
_PLAIN = {type(None), bool, int, float, str}
_LISTS = {tuple, list}
_TENSORS = {Tensor, torch.nn.Parameter}

Form = tuple


class BackwardRecording(NamedTuple):
    """The launches of a backward, and what it was given."""

    is_alike: Callable[..., bool]  # (dout, tensors, out, lse) -> whether they are like those of the recording
    is_deterministic: bool
    recording: object


class KnownCall:
    """The decisions for a form of call, and the launches that they lead to.

    Its methods take `tensors`: those of a call that are there.
    """

    def __init__(
        self, names: list[str], inputs: Tensors, request: Request, served: Served, is_undone: bool, is_beside: bool
    ):
        # names: fields of `Tensors`, then of a request, of each tensor but those of `Request.lists`, which come last.
        self.names, self.arguments = names, [_argument(name, is_beside) for name in names]
        self.input_count = sum(name in Tensors._fields for name in names)
        self.request, self.served, self.is_undone = replace(without_tensors(request), lists=()), served, is_undone
        self.nothing = None  # where the pattern's kind has extra keys and the user gave none: these, without elements
        if inputs.extra_k is not None and "extra_k" not in names:
            with torch.inference_mode(False), torch.no_grad():
                self.nothing = torch.empty_like(inputs.extra_k, device=inputs.k.device)
        self.is_recorded = needs_gradient(*inputs)  # by autograd
        self.has_lists = bool(request.lists)
        self.is_of_three = self.arguments == ["q", "k", "v"] and not self.has_lists and not is_undone
        fields = names[: self.input_count]
        self.gradients = [*map(Tensors._fields.index, fields)]  # the number of each input's among `Tensors`
        self.has_empty = any(getattr(inputs, name).numel() == 0 for name in fields)
        self.recording = None
        self.starts_kernels = self.backward_starts_kernels = True  # as far as is known
        self.backward_recordings: list[BackwardRecording] = []
        self.beside: KnownCall | None = None  # what computes extra queries

    @classmethod
    def of(
        cls, inputs: Tensors, request: Request, served: Served, arguments: Mapping[str, object], *,
        is_undone: bool = False, is_beside: bool = False,
    ) -> "KnownCall | None":  # fmt: skip
        """The decisions of a call that was computed; None where a later one could not be given its tensors.

        Args:
            inputs, request: as validated.
            served: the backend that served.
            arguments: those of the user, by name.
            is_undone: whether k and v are put in sequence order first.
            is_beside: whether it is of extra queries.
        """
        given = {**inputs._asdict(), **dict(zip(TENSORS, tensors_of(request), strict=True))}
        reads_order = arguments.get("kv_ordering") is not None and not is_undone
        names = []
        for name, x in given.items():
            is_made = (name == "seed" and x is not None) or (name == "inverse" and reads_order)
            own = arguments.get(_argument(name, is_beside))
            if is_made or (x is not None and own is x):
                names.append(name)
            elif x is not None and (x.numel() or own is not None):  # a copy
                return None
        return cls(names, inputs, request, served, is_undone, is_beside)

    def computed(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: dict[str, object]
    ) -> Tensor | tuple[Tensor, ...]:
        """The results of a call of this form, as the user gets them. options: all other arguments by name."""
        with_lse = options["return_lse"]
        if self.is_of_three and self.beside is None:
            return self.attention((q, k, v), with_lse)
        arguments = {"q": q, "k": k, "v": v, **options}
        results = self.attention(self._tensors_of(arguments, pattern), with_lse)
        if self.beside is None:
            return results
        extra_results = self.beside.attention(self.beside._tensors_of(arguments, pattern), with_lse)
        return (*results, *extra_results) if with_lse else (results, extra_results)

    def _tensors_of(self, arguments: dict[str, object], pattern: Pattern) -> tuple[Tensor, ...]:
        made = {}
        if self.is_undone:
            made = {name: in_sequence(arguments[name], arguments["kv_ordering"]) for name in "kv"}
        elif "inverse" in self.names:
            made["inverse"] = arguments["kv_ordering"].slots(arguments["k"].device)
        if "seed" in self.names:
            made["seed"] = new_seed(arguments["q"].device)
        tensors = [made[name] if name in made else arguments[name] for name in self.arguments]
        return *tensors, *(pattern.list_tensors if self.has_lists else ())

    def attention(self, tensors: tuple[Tensor, ...], with_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
        """Output, with lse if it is asked for; differentiable once."""
        if self.is_recorded and not is_below_autograd():
            count = len(self.names)
            apply = _apply_with_lse if with_lse else _apply
            return apply(self, tensors[count:], *tensors[:count])
        out, lse = self.forward(tensors)
        return (out, lse) if with_lse else out

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        if self.recording is not None and (results := self.recording.run(tensors)) is not None:
            return results
        if not self.starts_kernels:
            return run_forward(*self._unpacked(tensors), self.served)
        with _with_versions(), taped(tensors) as tape:
            results = run_forward(*self._unpacked(tensors), self.served)
        self.recording, self.starts_kernels = tape.recording(results), tape.has_starts
        return results

    def saved(self, tensors: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """The tensors that autograd saves: inputs, results, and what has no gradient."""
        count = self.input_count
        if self.nothing is None:
            return *tensors[:count], out, lse, *tensors[count:]
        return *tensors[:3], self.nothing, self.nothing, *tensors[3:count], out, lse, *tensors[count:]

    def restored(self, saved: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Tensors, out and lse of `saved`."""
        if self.nothing is not None:
            saved = saved[:3] + saved[5:]
        count = self.input_count
        return saved[:count] + saved[count + 2 :], saved[count], saved[count + 1]

    def backward(
        self, dout: Tensor, tensors: tuple[Tensor, ...], out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> list[Tensor | None]:
        """The gradient of each tensor that is a field of `Tensors`."""
        given, is_watched = (dout, *tensors, out, lse), is_thread_watched()
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        may_record = dlse is None and not (self.has_empty or is_watched or torch.is_grad_enabled())
        if may_record:
            for is_alike, was_deterministic, recording in self.backward_recordings:
                if was_deterministic == is_deterministic and is_alike(*given):
                    if (grads := recording.run(given)) is not None:
                        return grads
                    break
        inputs, request = self._unpacked(tensors)
        if is_watched or not _TENSORS.issuperset(map(type, given)) or not plain_keys(dout):
            return self._own(operators.dispatched_backward(dout, inputs, out, lse, dlse, request, self.served.name))
        if not (may_record and self.backward_starts_kernels):
            return self._own(unwatched_backward(dout, inputs, out, lse, dlse, request, self.served))
        with taped(given) as tape:
            grads = self._own(unwatched_backward(dout, inputs, out, lse, dlse, request, self.served))
        self.backward_starts_kernels = tape.has_starts
        if (recording := tape.recording(grads)) is not None:
            if len(self.backward_recordings) >= MOST_BACKWARDS:
                self.backward_recordings.clear()
            self.backward_recordings.append(BackwardRecording(form_check(*given), is_deterministic, recording))
        return grads

    def _own(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        return [grads[number] for number in self.gradients]

    def _unpacked(self, tensors: tuple[Tensor, ...]) -> tuple[Tensors, Request]:
        # What the backend is given.
        count = len(self.names)
        fields = dict(zip(self.names, tensors[:count], strict=True))
        inputs = Tensors(*(fields.pop(name, None) for name in Tensors._fields))
        if self.nothing is not None:
            inputs = inputs._replace(extra_k=self.nothing, extra_v=self.nothing)
        if len(tensors) == self.input_count:
            return inputs, self.request
        return inputs, replace(self.request, lists=tensors[count:], **fields)


@contextmanager
def _with_versions() -> Iterator[None]:
    """A context in which new tensors have versions. By these a tape sees what changed.

    In inference mode a new tensor has none.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def new_seed(device: torch.device) -> Tensor:
    """The key of the dropout bits of a call."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)


def _argument(name: str, is_beside: bool) -> str:
    # The argument of the user that is the field of this name.
    return "extra_q" if is_beside and name == "q" else ARGUMENTS.get(name, name)


# They save what `autograd.Differentiable` saves, in the same order: a checkpoint may recompute one by another.
def _forward_of(
    ctx: object, known_call: KnownCall, lists: tuple[Tensor, ...], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    out, lse = known_call.forward((*tensors, *lists) if lists else tensors)
    ctx.known_call, ctx.lists = known_call, lists
    ctx.save_for_backward(*known_call.saved(tensors, out, lse))
    ctx.set_materialize_grads(False)  # autograd would fill a gradient of lse with zeros in every backward
    return out, lse


def _backward_of(ctx: object, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    known_call = ctx.known_call
    if dout is None and dlse is None:
        return (None,) * (2 + len(known_call.names))
    tensors, out, lse = known_call.restored(ctx.saved_tensors)
    dout = torch.zeros_like(out) if dout is None else dout
    grads = known_call.backward(dout, (*tensors, *ctx.lists), out, lse, dlse)
    rest = len(known_call.names) - known_call.input_count
    return None, None, *grads, *(None,) * rest


class _WithLse(torch.autograd.Function):
    """(known_call, lists, *tensors) -> (out, lse); differentiable once."""

    @staticmethod
    def forward(ctx, known_call: KnownCall, lists: tuple[Tensor, ...], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return _forward_of(ctx, known_call, lists, tensors)

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward_of(ctx, dout, dlse)


class _OutAlone(torch.autograd.Function):
    """(known_call, lists, *tensors) -> out: each output of a function takes autograd a tenth of a short call."""

    @staticmethod
    def forward(ctx, known_call: KnownCall, lists: tuple[Tensor, ...], *tensors: Tensor) -> Tensor:
        return _forward_of(ctx, known_call, lists, tensors)[0]

    @staticmethod
    def backward(ctx, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward_of(ctx, dout, None)


_apply_with_lse, _apply = plain_apply(_WithLse), plain_apply(_OutAlone)


class _Alike(NamedTuple):
    # A form of call: checks of q, of k and of v, which may be one tensor, and what is known of it.
    is_like_q: Callable[[Tensor], bool]
    is_like_k: Callable[[Tensor], bool]
    is_like_v: Callable[[Tensor], bool]
    call: KnownCall


_calls: dict[Form, list[_Alike]] = {}


def form_of(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, door: Callable, options: dict) -> Form | None:
    """The key of a call's form, or None where it has no form.

    door: what the pattern's kind is checked by. options: all other arguments by name.
    """
    if is_thread_watched() or not _TENSORS.issuperset((type(q), type(k), type(v))) or not (q.is_cuda or q.is_cpu):
        return None
    values = options.values()
    kinds = tuple(map(type, values))  # 1, 1.0 and True are equal
    if not _PLAIN.issuperset(kinds):
        values = [
            value if kind in _PLAIN else _form_of_value(value, kind) for value, kind in zip(values, kinds, strict=True)
        ]
        if _NO_FORM in values:
            return None
    try:
        of_tensors = q.shape, k.shape, q.dtype, q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16
    except RuntimeError:  # a nested tensor has no shape and a sparse one no address: they are refused in words
        return None
    if isinstance(pattern, PointNeighbourhood):  # points themselves would keep their lists
        pattern = pattern.form, *map(_form_of_tensor, pattern.list_tensors)
    device_type = "cuda" if q.is_cuda else "cpu"  # to ask for its device takes longer
    return (
        pattern, door, kinds, *options, *values, *of_tensors,
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None,
        *((failures.changes, *changed_lately()) if options["backend"] == "auto" else ()),
    )  # fmt: skip


_NO_FORM = object()


def _form_of_value(value: object, kind: type) -> object:
    # Of an argument that is no plain value.
    if kind in _TENSORS:
        return _form_of_tensor(value) or _NO_FORM
    if kind is Ordering and value.table is None:
        return value
    return repr(value) if kind in _LISTS and _is_plain(value) else _NO_FORM  # False == 0, which is no integer here


def _form_of_tensor(x: Tensor) -> tuple | None:
    # None where it is more than its data.
    keys = plain_keys(x)
    if not keys:
        return None
    return keys, x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, x.data_ptr() % 16


def _is_plain(values: tuple | list) -> bool:
    return all(_is_plain(value) if type(value) in _LISTS else type(value) in _PLAIN for value in values)


def known(form: Form | None, q: Tensor, k: Tensor, v: Tensor) -> KnownCall | None:
    """The decisions for calls of this form, or None."""
    try:
        alike = _calls.get(form, ())
    except TypeError:  # a pattern, or a list of them, that has no hash
        return None
    for is_like_q, is_like_k, is_like_v, call in alike:
        if is_like_q(q) and is_like_k(k) and is_like_v(v):
            return call
    return None


def remember(form: Form | None, q: Tensor, k: Tensor, v: Tensor, call: KnownCall | None) -> None:
    """Keep the decisions for calls of a form. Of tensors that are more than their data nothing is kept."""
    if form is None or call is None or not all(map(plain_keys, (q, k, v))):
        return
    if sum(map(len, _calls.values())) >= MOST:
        _calls.clear()
    try:
        alike = _calls.setdefault(form, [])
    except TypeError:
        return
    if len(alike) >= MOST_ALIKE:
        alike.clear()
    alike.append(_Alike(*map(form_check, (q, k, v)), call))


def forget() -> None:
    """Forget every call: what a choice hangs on has changed, beside what a form holds."""
    _calls.clear()
    look_again()
