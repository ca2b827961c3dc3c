"""Activation offloading: what a forward pass keeps for the backward pass waits in the host's memory."""

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

SMALLEST = 2**12  # bytes below which moving a tensor costs more than it frees
IN_FLIGHT = 4  # copies to the host that the device may be ahead of
AHEAD = 2  # tensors that are fetched before the backward pass asks for them
_RECENT = 4  # saved tensors that are told apart from further saves of the same


class Offload(saved_tensors_hooks):
    """Inside, tensors that autograd saves wait on the host; the backward pass fetches each when it needs it.

    Parameters stay, which are on the device anyhow, and so do small tensors and views that repeat elements. The copies of frozen
    weights that autocast makes for linear layers are neither moved nor held, but made again; those that other operations take
    (experts in one tensor) are moved. On CUDA copies run beside the computation, from and to pinned memory. Nothing is held but
    by the graph itself.

    Args:
        module: whose parameters are known by their storage. Those of sharded layers exist from one layer to the next only, so
            that every layer names its own as it starts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._recent: deque[tuple[Any, Tensor, weakref.ref[Waiting]]] = deque(maxlen=_RECENT)
        self._order: list[weakref.ref[Waiting]] = []
        self._streams: dict[torch.device, Streams] = {}
        self._casts = FrozenCasts()
        super().__init__(self._pack, _unpack)

    def __enter__(self) -> None:
        for layer in self._module.modules():
            if layer._parameters:
                self._hooks.append(layer.register_forward_pre_hook(self._know))
        self._casts.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._casts.__exit__(*error)
        for streams in self._streams.values():
            streams.settle(0)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._recent.clear()
        self._known.clear()

    def _know(self, layer: nn.Module, inputs: Any) -> None:
        self._known.update(_address(p) for p in layer._parameters.values() if p is not None)

    def _pack(self, tensor: Tensor) -> "Waiting | Kept | Recast":
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.nbytes < SMALLEST or tensor.nbytes > tensor.untyped_storage().nbytes():
            return Kept(tensor)
        if (weight := self._casts.of.get(_address(tensor))) is not None:
            return Recast(tensor, weight)
        if _address(tensor) in self._known or _is_of_parameter(tensor):
            return Kept(tensor)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        for other, _, waiting in self._recent:
            if other == place and (found := waiting()) is not None:
                return found
        waiting = Waiting(tensor.detach(), self._order, self._streams_of(tensor.device))
        self._order.append(weakref.ref(waiting))
        # An address means this tensor as long as it is held.
        self._recent.append((place, tensor.detach(), weakref.ref(waiting)))
        return waiting

    def _streams_of(self, device: torch.device) -> "Streams | None":
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = Streams(device)
        return self._streams[device]


class Kept:
    """A tensor that stays where it is. (Autograd looks for changes in place only where there are no hooks.)"""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version  # detached: a result would hold its own graph

    def take(self) -> Tensor:
        """The tensor as it was saved.

        Raises:
            RuntimeError: it has been changed since.
        """
        if self.tensor._version != self.version:
            raise RuntimeError("a tensor that the backward pass needs was changed in place after the forward pass.")
        return self.tensor


class FrozenCasts(TorchFunctionMode):
    """Inside, frozen weights of linear layers are cast as autocast would, which holds no copies of them, and are told by their
    copies' addresses: ``of`` has them for as long as the layer is being computed."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or kwargs or not _is_cast_at_every_use(args[1]):
            return func(*args, **(kwargs or {}))
        inputs, weight, *bias = args
        cast = weight.to(torch.get_autocast_dtype(weight.device.type))
        self.of[_address(cast)] = weight
        try:
            return func(inputs, cast, *bias)
        finally:
            self.of.clear()


class Recast:
    """A frozen weight in another dtype: made again where it is needed.

    Args:
        cast: the copy, or a view of it.
        weight: what it is a copy of.
    """

    def __init__(self, cast: Tensor, weight: Tensor) -> None:
        self.weight, self.dtype = Kept(weight), cast.dtype
        self.view = cast.size(), cast.stride(), cast.storage_offset()

    def take(self) -> Tensor:
        """The copy, made again.

        Raises:
            RuntimeError: the weight has been changed since.
        """
        return self.weight.take().to(self.dtype).as_strided(*self.view)


class Streams:
    """The sides of a device on which copies run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving: deque[tuple[torch.cuda.Event, Tensor, int]] = deque()

    def send(self, tensor: Tensor, host: Tensor) -> torch.cuda.Event:
        """Starts a copy to the host. The tensor is held until the computation has waited for it, so that neither its memory nor
        its values change before."""
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            host.copy_(tensor, non_blocking=True)
        gone = self.out.record_event()
        self._leaving.append((gone, tensor, tensor._version))
        self.settle(IN_FLIGHT)
        return gone

    def settle(self, most: int) -> None:
        """Has the computation wait for all but the ``most`` last copies.

        Raises:
            RuntimeError: a tensor was changed in place while it was copied.
        """
        while len(self._leaving) > most:
            gone, tensor, version = self._leaving.popleft()
            torch.cuda.current_stream(self.device).wait_event(gone)
            if tensor._version != version:
                raise RuntimeError("a tensor that the backward pass needs was changed in place while it was offloaded.")

    def fetch(self, host: Tensor, gone: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        """Starts a copy to the device, into memory that is the computation's own; with it the event of its end."""
        tensor = torch.empty_like(host, device=self.device)
        self.back.wait_event(gone)
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.back):
            tensor.copy_(host, non_blocking=True)
        return tensor, self.back.record_event()


class Waiting:
    """A tensor that waits on the host.

    Args:
        tensor: on its device.
        order: all that wait of one forward pass, this one to be the next.
        streams: where copies run; None: here and now.
    """

    def __init__(self, tensor: Tensor, order: list["weakref.ref[Waiting]"], streams: Streams | None) -> None:
        self.device, self.order, self.number, self.streams = tensor.device, order, len(order), streams
        self.fetched: tuple[Tensor, torch.cuda.Event] | None = None
        self.host = _host_memory(tensor, pinned=streams is not None)
        if streams is None:
            self.host.copy_(tensor)
        else:
            self.gone = streams.send(tensor, self.host)

    def fetch(self) -> None:
        """Starts to bring it back, unless that has been done."""
        if self.streams is not None and self.fetched is None:
            self.fetched = self.streams.fetch(self.host, self.gone)

    def take(self) -> Tensor:
        """The tensor, on its device again; those that the backward pass needs next are on their way."""
        if self.streams is None:
            return self.host.to(self.device)
        self.fetch()
        for reference in self.order[max(0, self.number - AHEAD) : self.number]:
            if (waiting := reference()) is not None:
                waiting.fetch()
        (tensor, arrived), self.fetched = self.fetched, None
        torch.cuda.current_stream(self.device).wait_event(arrived)
        return tensor

    def __del__(self) -> None:
        # Fetched for a backward pass that never came: the memory may serve others once the copy into it has ended.
        if self.fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(self.fetched[1])


def _host_memory(tensor: Tensor, pinned: bool) -> Tensor:
    """Room for it, with its strides unless it is a view with gaps."""
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned)


def _unpack(packed: Waiting | Kept | Recast) -> Tensor:
    return packed.take()


def _is_of_parameter(tensor: Tensor) -> bool:
    """Whether it is made of one parameter alone: a view, or the copy in another dtype that autocast keeps for itself."""
    step = tensor.grad_fn
    while step is not None and len(step.next_functions) == 1:
        step = step.next_functions[0][0]
    return step is not None and isinstance(getattr(step, "variable", None), nn.Parameter)


def _is_cast_at_every_use(weight: Any) -> bool:
    if type(weight) is not nn.Parameter or weight.requires_grad or not torch.is_autocast_enabled(weight.device.type):
        return False
    return weight.dtype in (torch.float32, torch.float16, torch.bfloat16) and weight.dtype != torch.get_autocast_dtype(
        weight.device.type
    )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
