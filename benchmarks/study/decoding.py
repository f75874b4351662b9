"""Faster decoding by transformers on a CPU, for the studies of long completions."""

import functools

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer


def decode_faster() -> None:
    """
    Apply the patches of this module. Results only differ by the order of sums in attention, where heads share keys.
    """
    grow_cache_in_place()
    AttentionInterface.register("sdpa", attend_faster(AttentionInterface()["sdpa"]))


def grow_cache_in_place() -> None:
    """
    Write new keys and values into preallocated memory.

    transformers copies its cache for every token, and attention under autocast then rounds all keys to bf16 again.
    Both together took 90 % of the time of a rollout.
    """
    concatenate, select = DynamicLayer.update, DynamicLayer.batch_select_indices

    def update(self, key_states, value_states, *args, **kwargs):
        if torch.is_grad_enabled():
            return concatenate(self, key_states, value_states, *args, **kwargs)
        new = [states.to(value_states.dtype) for states in (key_states, value_states)]
        past = self.get_seq_length()
        if not past:
            self.lazy_initialization(*new)
            self.room = [new[0][:, :, :0]] * 2
        length = past + new[0].shape[2]
        if length > self.room[0].shape[2]:
            self.room = [torch.cat([room[:, :, :past], states.new_empty(*states.shape[:2], length + 256, states.shape[3])], 2) for room, states in zip(self.room, new, strict=True)]  # fmt: skip
        for room, states in zip(self.room, new, strict=True):
            room[:, :, past:length] = states
        self.keys, self.values = (room[:, :, :length] for room in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        select(self, indices)
        self.room = [self.keys, self.values]

    DynamicLayer.update, DynamicLayer.batch_select_indices = update, batch_select_indices


def attend_faster(original):
    """
    Compute attention as two products, for a single query `(B, H, 1, D)` per sequence and fewer heads of keys.

    On a CPU, torch's kernel works on blocks of queries, takes two to three times as long, and needs a copy of the keys
    for each head.
    """

    @functools.wraps(original)
    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        batch, heads, length, features = query.shape
        if length > 1 or key.shape[1] == heads or torch.is_grad_enabled():
            return original(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        scores = torch.matmul(query.view(batch, key.shape[1], -1, features) * scaling, key.mT)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, float("-inf"))
        return torch.matmul(scores.softmax(-1), value).view(batch, length, heads, features), None

    return attend
