"""torch.cat([first, act(x)], dim=-1) in which the activation writes its part of the result. It is an operator of its
own, because Dynamo does not accept a view as out=, and Inductor's kernel takes twice as long."""

import torch

from ..operators import fake
from ..operators._ops import ops
from ..operators.functions import ACTS

WORD = torch.int64


def _as_words(x):
    """x as 8-byte words, or None where it is not aligned. torch copies a view of half-precision rows element by
    element, which is slower."""
    step = WORD.itemsize // x.element_size()
    whole = x.stride(-1) == 1 and not any(n % step for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(WORD) if whole and x.data_ptr() % WORD.itemsize == 0 else None


def _concat_activation(first, x, act):
    size = first.shape[-1]
    room = x.new_empty((*x.shape[:-1], size + x.shape[-1]))
    ops.activation.out(x, act, out=room[..., size:])
    to, words = _as_words(room[..., :size]), _as_words(first)
    if to is None or words is None:
        room[..., :size] = first
    else:
        to.copy_(words)
    return room


def _shape(first, x, act):
    return fake.dense(x, (*x.shape[:-1], first.shape[-1] + x.shape[-1]))


_operator = fake.operator("concat_activation(Tensor first, Tensor x, int act) -> Tensor", _concat_activation, _shape)


def concat_activation(first, x, act):
    """first and act(x), side by side in each row."""
    fake.refuse_gradients(first, x)
    return _operator(first, x, ACTS[act])
