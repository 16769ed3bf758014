"""Counts what a computation on fake tensors would do on a device: kernels, bytes moved, memory held, waits, dtypes.

Nothing is computed and no device is needed. Each operator that torch dispatches is one kernel, except views and empty
memory. Bytes: each tensor that an operator reads or writes once, a broadcast one by its real size. Attention is one
kernel, as the fused implementations run it. Memory is what is allocated while the watch is on, by storage.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["product", "attention", "pointwise"]
aten = torch.ops.aten

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm", "convolution"}
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "device", "lift_fresh", "alias"}
#: in-place operators that overwrite without reading
_ONLY_WRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
#: overloads that write their result into a tensor given for it
_GIVEN = {"out", "grad_input", "dim_min"}
#: operators whose result's size depends on the numbers in a tensor, so that the host has to wait for it
_WAITING = {"nonzero", "masked_select", "unique_dim", "_unique2", "equal", "bincount"}
_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class Kernel:
    """One operator: its name, kind, bytes read and written, and multiply-adds times two for products."""

    name: str
    kind: Kind
    read: int
    written: int
    flops: int = 0

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass
class Trace:
    """What was seen. peak: most bytes held at once of those allocated meanwhile. waits, wide, elsewhere: names of
    operators that make the host wait, touch float64, or touch a tensor that is not on the device."""

    device: str
    kernels: list[Kernel] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    waits: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    dtypes: Counter[str] = field(default_factory=Counter)

    def moved(self, kind: Kind) -> int:
        """Bytes moved by all kernels of a kind."""
        return sum(kernel.moved for kernel in self.kernels if kernel.kind == kind)

    def flops(self, kind: Kind) -> int:
        return sum(kernel.flops for kernel in self.kernels if kernel.kind == kind)


class Watch(TorchDispatchMode):
    """Fills a `Trace` with every operator dispatched inside a FakeTensorMode. Enter it after that mode."""

    #: the one that is on, for kernels that torch does not dispatch
    current: ClassVar[Watch | None] = None

    def __init__(self, device: str) -> None:
        super().__init__()
        self.trace = Trace(device)
        self._known: set[int] = set()
        self._functions = DeviceFunctions(self)

    def __enter__(self) -> Watch:
        Watch.current = self
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)
        Watch.current = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.trace.waits.append("item")
            return 1.0 if args[0].dtype.is_floating_point else False
        if func._overloadname in _GIVEN:  # nothing to find out, and fake ones copy at the end, which needs the device
            given = _changed(func, args, kwargs)
            out = given[0] if len(given) == 1 else tuple(given)
        else:
            out = func(*args, **kwargs)
        if name in _NO_KERNEL or _is_view(func):
            self._hold(out)
            return out
        self._record(func, name, args, kwargs, out)
        self._hold(out)
        return out

    def _record(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        changed = _changed(func, args, kwargs)
        given = [t for t in _tensors(out) if not any(t is other for other in changed)]
        if func._overloadname in _GIVEN:
            inputs = _tensors([args, [value for name, value in kwargs.items() if name not in _written(func)]])
        else:
            inputs = _tensors((args, kwargs))[1 if name in _ONLY_WRITE else 0 :]
        if name == "index_select":
            read = _gathered(inputs, given)
        else:
            read = sum(_size(t) for t in inputs)
        written = sum(_size(t) for t in (*changed, *given))
        kind: Kind = "product" if name in _PRODUCTS else "pointwise"
        self.trace.kernels.append(Kernel(name, kind, read, written, _flops(name, inputs) if kind == "product" else 0))
        touched = [*inputs, *changed, *given]
        self._note(name, touched)
        copied_over = name in ("_to_copy", "copy_") and len({t.device.type for t in touched}) > 1
        if name in _WAITING or _has_bool_index(name, args) or (copied_over and not kwargs.get("non_blocking")):
            self.trace.waits.append(name)

    def _note(self, name: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.trace.dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
            if tensor.dtype in _WIDE:
                self.trace.wide.append(name)
            if tensor.device.type != self.trace.device:
                self.trace.elsewhere.append(name)

    def kernel(self, name: str, kind: Kind, taken: list[Tensor], out: Tensor, flops: int = 0) -> None:
        """Count one kernel that torch here would run as several."""
        self.trace.kernels.append(Kernel(name, kind, sum(map(_size, taken)), _size(out), flops))
        self._note(name, [*taken, out])

    def _hold(self, out: Any) -> None:
        """Follow the storages that came into being with `out` until they are freed."""
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            self._known.add(key)
            size = storage.nbytes()
            self.trace.held += size
            self.trace.peak = max(self.trace.peak, self.trace.held)
            weakref.finalize(storage, self._freed, key, size)

    def ignore(self, *tensors: Tensor) -> None:
        """Weights and inputs: what is there already does not count as held."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.trace.held -= size


class DeviceFunctions(TorchFunctionMode):
    """What has to be settled above the dispatcher: attention and RMSNorm are one kernel each on every device, and
    indexing must not ask for a device that this build of torch was not made for."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        match getattr(func, "__name__", ""):
            case "scaled_dot_product_attention":
                return self._attention(*args[:3])
            case "rms_norm":
                return self._rms_norm(*args, **kwargs)
            case "__getitem__" if isinstance(args[0], Tensor):
                return _indexed(args[0], args[1])
            case "__setitem__" if isinstance(args[0], Tensor):
                target, value = _indexed(args[0], args[1]), args[2]
                return (aten.copy_ if isinstance(value, Tensor) else aten.fill_)(target, value)
            case "copy_":
                return aten.copy_(*args, **kwargs)
            case "__invert__":
                return aten.bitwise_not(*args)
        return func(*args, **kwargs)

    def _rms_norm(self, x: Tensor, _shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        out = torch.empty_like(x)
        self.watch.kernel("rms_norm", "pointwise", [x] if weight is None else [x, weight], out)
        return out

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # the fused kernels lay their result out as [B, S, H, Dh]
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        self.watch.kernel("attention", "attention", [q, k, v], out, flops=4 * q.numel() * k.shape[-2])
        return out


def _indexed(tensor: Tensor, index: Any) -> Any:
    """Basic indexing by views; anything else by the operator it comes to."""
    steps = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(step, Tensor | list) for step in steps):
        full = [step if isinstance(step, Tensor) else None for step in steps]
        return aten.index.Tensor(tensor, full)
    if Ellipsis in steps:
        at = steps.index(Ellipsis)
        given = sum(step is not None for step in steps) - 1
        steps[at : at + 1] = [slice(None)] * (tensor.dim() - given)
    dim = 0
    for step in steps:
        if step is None:
            tensor, dim = aten.unsqueeze(tensor, dim), dim + 1
        elif isinstance(step, slice):
            if step != slice(None):
                tensor = aten.slice(tensor, dim, step.start, step.stop, step.step or 1)
            dim += 1
        else:
            tensor = aten.select(tensor, dim, step)
    return tensor


def _tensors(values: Any) -> list[Tensor]:
    """Every tensor in a structure once."""
    found: dict[int, Tensor] = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
    return list(found.values())


def _size(tensor: Tensor) -> int:
    """Bytes of what is really there: a dimension that is only expanded counts once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride or length == 0 else 1
    return count * tensor.element_size()


def _gathered(inputs: list[Tensor], given: list[Tensor]) -> int:
    """Bytes read to gather single elements: memory comes in sectors of 32."""
    return min(_size(inputs[0]), 32 * given[0].numel()) + sum(map(_size, inputs[1:]))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _written(func: Any) -> list[str]:
    """Names of the arguments that an operator writes into."""
    return [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes into."""
    names = [one.name for one in func._schema.arguments]
    return _tensors([kwargs[name] if name in kwargs else args[names.index(name)] for name in _written(func)])


def _flops(name: str, taken: list[Tensor]) -> int:
    """Two per multiply-add of a product of matrices."""
    a, b = (taken[1], taken[2]) if name in ("addmm", "baddbmm") else (taken[0], taken[1])
    columns = b.shape[0] if name == "linear" else b.shape[-1]
    return 2 * a.numel() * columns


def _has_bool_index(name: str, args: tuple[Any, ...]) -> bool:
    return name.startswith("index") and any(t.dtype == torch.bool for t in _tensors(args[1:2]))


def count(device: str, run: Callable[[], object], *there: Tensor) -> Trace:
    """The trace of `run` (inside a FakeTensorMode); `there`: weights and inputs, which are not counted as held."""
    with Watch(device) as watch:
        watch.ignore(*there)
        run()
    return watch.trace
