"""`nn.LSTM`, `nn.GRU` and `nn.RNN` of stacked members: each time step's cell is a batched product for all members.

The arithmetic is that of torch's own cells (`RNN.cpp`). As in torch, a layer's input products are computed for all time
steps at once. Dropout between layers draws each member's masks from the member's own generator. `StackedGraph`
(`batched_graph.py`) calls a rule at each run of a recurrent layer's operator on stacked members, except in low precision
where torch has a kernel of its own. A rule must not mix members, and must not know trials, groups or pools.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_tune.batched.batched_random import drawn, masks

aten: Any = torch.ops.aten

_State = tuple[Tensor, ...]
_Cell = Callable[[Tensor, _State, "_RecurrentWeights"], _State]
"""Cell of a layer: (projected inputs, state, weights) -> next state, whose first tensor is the layer's output."""


class _RecurrentWeights:
    """Parameters of a layer in a direction.

    `tensors` are `(N, out, in)` for the input and for the hidden state, then the biases and a projection, if any.
    """

    def __init__(self, tensors: Sequence[Tensor], *, has_biases: bool) -> None:
        self._input, self._hidden = (tensor.transpose(1, 2) for tensor in tensors[:2])
        self._biases = [tensor.unsqueeze(1) for tensor in tensors[2:4]] if has_biases else []
        projections = tensors[4 if has_biases else 2 :]
        self.projection = projections[0].transpose(1, 2) if projections else None

    def of_inputs(self, x: Tensor) -> Tensor:
        """Map `(N, moments, batch, in)` to `(N, moments, batch, out)`."""
        rows = x.reshape(x.size(0), -1, x.size(-1))
        products = torch.baddbmm(self._biases[0], rows, self._input) if self._biases else torch.bmm(rows, self._input)
        return products.view(*x.shape[:-1], -1)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """Map `(N, batch, hidden)` to `(N, batch, out)`."""
        return torch.baddbmm(self._biases[1], hidden, self._hidden) if self._biases else hidden @ self._hidden


def _lstm_cell(inputs: Tensor, state: _State, weights: _RecurrentWeights) -> _State:
    hidden, cell = state
    # torch's order of the gates: input, forget, cell, output.
    enters, forgets, candidate, leaves = (weights.of_hidden(hidden) + inputs).chunk(4, 2)
    cell = forgets.sigmoid() * cell + enters.sigmoid() * candidate.tanh()
    hidden = leaves.sigmoid() * cell.tanh()
    return (hidden if weights.projection is None else hidden @ weights.projection), cell


def _gru_cell(inputs: Tensor, state: _State, weights: _RecurrentWeights) -> _State:
    (hidden,) = state
    # torch's order of the gates: reset, update, new.
    resets, keeps, adds = weights.of_hidden(hidden).chunk(3, 2)
    input_resets, input_keeps, input_adds = inputs.chunk(3, 2)
    candidate = (input_adds + adds * (resets + input_resets).sigmoid()).tanh()
    # Written as in torch's kernel, for the same rounding.
    return ((hidden - candidate) * (keeps + input_keeps).sigmoid() + candidate,)


def _tanh_cell(inputs: Tensor, state: _State, weights: _RecurrentWeights) -> _State:
    return ((weights.of_hidden(state[0]) + inputs).tanh(),)


def _relu_cell(inputs: Tensor, state: _State, weights: _RecurrentWeights) -> _State:
    return ((weights.of_hidden(state[0]) + inputs).relu(),)


def lstm(x: Tensor, states: Sequence[Tensor], *arguments: Any, slot: str | None = None) -> tuple[Tensor, ...]:
    """Run `aten::lstm.input` with the members in front of every tensor."""
    return _layers(_lstm_cell, x, states, *arguments, slot=slot)


def gru(x: Tensor, state: Tensor, *arguments: Any, slot: str | None = None) -> tuple[Tensor, ...]:
    """Run `aten::gru.input` likewise."""
    return _layers(_gru_cell, x, (state,), *arguments, slot=slot)


def rnn_tanh(x: Tensor, state: Tensor, *arguments: Any, slot: str | None = None) -> tuple[Tensor, ...]:
    """Run `aten::rnn_tanh.input` likewise."""
    return _layers(_tanh_cell, x, (state,), *arguments, slot=slot)


def rnn_relu(x: Tensor, state: Tensor, *arguments: Any, slot: str | None = None) -> tuple[Tensor, ...]:
    """Run `aten::rnn_relu.input` likewise."""
    return _layers(_relu_cell, x, (state,), *arguments, slot=slot)


def _layers(
    cell: _Cell,
    x: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    slot: str | None,
) -> tuple[Tensor, ...]:
    """Run all layers, as torch's operators do, with the members in front of every tensor.

    `x` is `(N, moments, batch, in)`, or with `batch_first` `(N, batch, moments, in)`. Each of `states` is
    `(N, layers * directions, batch, hidden)`. The parameters are ordered by layer and direction. Return the last
    layer's output, shaped like `x`, and the last states, shaped like `states`. `slot` is as of `masks`.
    """
    directions = 2 if bidirectional else 1
    weights = _by_layer(parameters, num_layers * directions, has_biases=has_biases)
    x = x.transpose(1, 2) if batch_first else x
    ends: list[_State] = []
    for layer in range(num_layers):
        direction_outputs: list[Tensor] = []
        for direction in range(directions):
            begin = tuple(state[:, len(ends)] for state in states)
            outputs, end = _layer(cell, x, begin, next(weights), backwards=direction == 1)
            direction_outputs.append(outputs)
            ends.append(end)
        x = torch.cat(direction_outputs, 3) if bidirectional else direction_outputs[0]
        if dropout and train and layer + 1 < num_layers:
            # Torch drops between layers only, never after the last layer.
            x = _dropped(x, dropout) if slot is None else x * masks(slot, torch.empty_like(x.detach()))
    last_states = tuple(torch.stack(layer_states, 1) for layer_states in zip(*ends, strict=True))
    return (x.transpose(1, 2) if batch_first else x, *last_states)


def _by_layer(parameters: Sequence[Tensor], count: int, *, has_biases: bool) -> Iterator[_RecurrentWeights]:
    num_each = len(parameters) // count
    for begin in range(0, len(parameters), num_each):
        yield _RecurrentWeights(parameters[begin : begin + num_each], has_biases=has_biases)


def _layer(
    cell: _Cell, x: Tensor, state: _State, weights: _RecurrentWeights, *, backwards: bool
) -> tuple[Tensor, _State]:
    inputs = weights.of_inputs(x).unbind(1)
    outputs: list[Tensor] = []
    for moment in reversed(inputs) if backwards else inputs:
        state = cell(moment, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), state


def _dropped(x: Tensor, p: float) -> Tensor:
    """Drop as `torch.dropout` in training, with a separate mask for every member.

    Alone, a member's tensor is contiguous with time steps first; masks are drawn in the same order.
    """
    if p == 1.0:
        return x * 0.0
    empty = torch.empty_like(x.detach())
    noise = drawn(aten.bernoulli_.float, (empty, 1 - p), {}, (True, False), x.size(0), is_dropout=True)
    return x * (noise / (1 - p))


RECURRENT: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: lstm,
    aten.gru.input: gru,
    aten.rnn_tanh.input: rnn_tanh,
    aten.rnn_relu.input: rnn_relu,
}
