"""Cache keys and values for decoding.

Rows that continue the same prompt (its beams) form a *prefix group* and share memory: the prompt is stored once, the
new tokens of all rows lie side by side, and a mask says which of them each row sees. So reordering beams moves no keys.

Axis letters: G prefix groups, W rows of a group, C new columns, L = W C queries of a group, S slots, N query heads,
K key heads, R = N / K query heads of a key head, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.chunked_attention import ScoreRule

MORE_ROOM = 64  # slots added to every allocation, besides geometric growth


class KVCache:
    """Keys and values of every layer. A pass over the layers fills it with prompts, or extends it by the next tokens.

    Prompts shorter than the longest leave their first slots unused, so that all groups grow at the same slot.
    """

    def __init__(self) -> None:
        self.num_slots = 0  # used slots of each group
        self.lengths = torch.empty(0, dtype=torch.int64)  # tokens of each row, [G W]
        self._counts: tuple[int, ...] = ()  # tokens of each prompt
        self._width = 1
        self._beams_reordered = False
        self._compact_at = 0  # number of slots from which compaction may pay
        self._seen_GWS: Tensor | None = None  # None: every row sees every slot
        self._seen_GLS: Tensor | None = None  # of this pass; None: every query sees every slot
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # of this pass, see `_mask_for`
        self._dtype = torch.float32  # of this pass's scores
        self._begin = 0  # first slot of this pass
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [G, K, allocated slots, H]

    def begin(self, counts: Sequence[int], width: int, device: torch.device) -> None:
        """Announce a pass over prompts, one per group.

        Args:
            counts: tokens of each prompt.
            width: rows that will continue each prompt.
            device: device of the keys.
        """
        self.num_slots, self._width, self._counts = max(counts), width, tuple(counts)
        self._layers = {}
        counts_G = torch.tensor(counts, device=device)
        self.lengths = counts_G.repeat_interleave(width)
        if min(counts) < self.num_slots:
            slots = torch.arange(self.num_slots, device=device)
            self._seen_GWS = (slots >= self.num_slots - counts_G[:, None])[:, None].repeat(1, width, 1)

    def put(
        self, layer: int, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Sequence[int], groups: Sequence[int] = ()
    ) -> None:
        """Store a layer's keys and values of prompts; a document's tokens after the prompt are not stored.

        In a decode step, the documents are rows up to their newest tokens, and replace what is stored of them.

        Args:
            k_TKH, v_TKH: keys and values of documents that begin with prompts.
            groups: group numbers of the prompts, in a decode step numbers of the rows; default: the first ones.
        """
        if self._begin:
            self._replace(self._layers[layer], (k_TKH, v_TKH), cu_seqlens, groups)
            return
        if layer not in self._layers:
            shape = (len(self._counts), k_TKH.shape[1], self.num_slots + MORE_ROOM, k_TKH.shape[2])
            # Zeros: masked slots must be finite too, since 0 * inf is NaN.
            self._layers[layer] = k_TKH.new_zeros(shape), v_TKH.new_zeros(shape)
        for group, start in zip(groups or range(len(cu_seqlens) - 1), cu_seqlens, strict=False):
            count = self._counts[group]
            for all_GKSH, x_TKH in zip(self._layers[layer], (k_TKH, v_TKH), strict=True):
                kept = all_GKSH[group, :, self.num_slots - count : self.num_slots]
                kept.copy_(x_TKH[start : start + count].transpose(0, 1))

    def _replace(
        self, kept: Sequence[Tensor], new: Sequence[Tensor], cu_seqlens: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Replace a layer's keys and values of rows; shared ones of a prompt are the same for each of its rows."""
        for row, (start, end) in zip(rows, pairwise(cu_seqlens), strict=True):
            group, number = divmod(row, self._width)
            slots = torch.arange(self.num_slots, device=self.lengths.device)
            if self._seen_GWS is not None:  # in the order of the row's tokens
                slots = slots[self._seen_GWS[group, number]]
            for all_GKSH, x_TKH in zip(kept, new, strict=True):
                all_GKSH[group].index_copy_(1, slots, x_TKH[start:end].transpose(0, 1))

    def begin_decode_step(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Announce a pass over the next tokens of every row; return their positions, int64 [rows, columns].

        Args:
            columns: tokens of each row.
            dtype: type of the attention scores.
        """
        # Rows that were never reordered are independent samples: in groups of their own they need no mask.
        if self._width > 1 and (columns > 1 or not self._beams_reordered):
            self._split_groups()
        # Every row appends `columns` slots to its group. A row sees the old slots as before. Among the new ones it sees
        # only its own (beams), or those up to its own column (several columns, one row per group).
        self._begin, size, device = self.num_slots, self._width * columns, self.lengths.device
        self.num_slots += size
        self._seen_GLS, self._masks, self._dtype = None, {}, dtype
        if self._seen_GWS is not None or size > 1:
            groups = len(self.lengths) // self._width
            old_GLS = self._seen_GWS if self._seen_GWS is not None else _all((1, 1, self._begin), device)
            new_LL = torch.eye(size, device=device).bool() if self._width > 1 else _all((size, size), device).tril()
            seen_GLS = torch.cat((old_GLS.expand(groups, size, -1), new_LL.expand(groups, -1, -1)), dim=2)
            self._seen_GLS = seen_GLS
            if self._width > 1 or self._seen_GWS is not None:
                # The next pass starts from the view of each row's last column.
                self._seen_GWS = seen_GLS[:, -self._width :]
        positions = self.lengths[:, None] + torch.arange(columns, device=device)
        self.lengths = self.lengths + columns
        return positions

    def attend(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rule: ScoreRule) -> Tensor:
        """Attend from the pass's tokens to all tokens that their rows have seen, themselves included; [T, N, H]."""
        groups, (_, heads, width) = len(self.lengths) // self._width, k_TKH.shape
        k, v = (x.view(groups, -1, heads, width).transpose(1, 2) for x in (k_TKH, v_TKH))
        kept = self._with_room(layer)
        for all_GKSH, new_GKLH in zip(kept, (k, v), strict=True):
            all_GKSH[:, :, self._begin : self.num_slots] = new_GKLH
        # Without hidden slots, the last ones have a row's newest tokens.
        first = 0 if self._seen_GLS is not None or rule.window is None else max(0, self.num_slots - rule.window)
        k, v = (x[:, :, first : self.num_slots] for x in kept)
        # The query heads of a key head become further queries: keys are read once, and not copied per head. Measured
        # beside copied keys, 8 rows of 400 tokens, one thread of an AMD EPYC with AVX-512: 0.24 and 0.88 ms with 9/3
        # heads of 64, 0.6 and 5.6 with 32/8 of 64, 2.1 and 6.3 with 16/8 of 128.
        q_GLKRH = q_TNH.view(groups, -1, heads, q_TNH.shape[1] // heads, width)
        q_GKRLH = q_GLKRH.permute(0, 2, 3, 1, 4)
        queries, mask = q_GKRLH.flatten(2, 3), self._mask_for(q_GLKRH.shape[3], rule.window)
        if rule.cap is None:
            out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=rule.scale)
        else:
            scores = (queries * rule.factor @ k.transpose(2, 3)).float().tanh_().mul_(rule.cap)
            out = (scores if mask is None else scores + mask).softmax(-1).to(v.dtype) @ v
        return out.view(q_GKRLH.shape).permute(0, 3, 1, 2, 4).reshape(q_TNH.shape)

    def _mask_for(self, repeats: int, window: int | None) -> Tensor | None:
        """Return the mask of this pass, added to the scores, [G, 1, R L, S]; ``None``: no slot is hidden.

        Args:
            repeats: query heads of a key head, R.
            window: newest tokens that a query sees; ``None``: all.
        """
        if window is not None and window >= self.num_slots:
            window = None
        if self._seen_GLS is None:
            return None
        if (repeats, window) not in self._masks:
            seen_GLS = self._seen_GLS
            if window is not None:
                # A row's slots are in the order of its tokens, so the newest tokens are the last slots that it sees.
                counts_GLS = seen_GLS.cumsum(-1)
                seen_GLS = seen_GLS & (counts_GLS > counts_GLS[..., -1:] - window)
            scores = torch.zeros(seen_GLS.shape, dtype=self._dtype, device=seen_GLS.device)
            scores.masked_fill_(~seen_GLS, -math.inf)
            self._masks[repeats, window] = scores.repeat(1, repeats, 1)[:, None]
        return self._masks[repeats, window]

    def select(self, rows: Tensor) -> None:
        """Select rows: row ``i`` becomes the former ``rows[i]``; other rows are dropped (beams, finished rows)."""
        width = self._width
        groups = torch.arange(len(self.lengths), device=rows.device) // width
        # Beams that stay within their groups: only the visibility mask is permuted, no key moves.
        if width > 1 and len(rows) == len(groups) and torch.equal(rows // width, groups):
            self._beams_reordered = True
            self.lengths = self.lengths[rows]
            if self._seen_GWS is not None:
                index = (rows % width).view(-1, width, 1).expand_as(self._seen_GWS)
                self._seen_GWS = self._seen_GWS.gather(1, index)
                self._forget_unseen(self._seen_GWS)
            return
        self._split_groups()
        self.lengths = self.lengths[rows]
        self._seen_GWS = None if self._seen_GWS is None else self._seen_GWS[rows]
        for layer, (k, v) in self._layers.items():  # one by one, so that old tensors are freed early
            self._layers[layer] = k[rows], v[rows]

    def crop(self, columns: int) -> None:
        """Forget the newest tokens of every row."""
        assert self._width == 1, "beams cannot be cropped"
        self.num_slots -= columns
        self.lengths = self.lengths - columns
        if self._seen_GWS is not None:
            self._seen_GWS = self._seen_GWS[:, :, : self.num_slots]

    def _split_groups(self) -> None:
        """Give each row a group of its own."""
        width, self._width = self._width, 1
        if width == 1:
            return
        for layer, (k, v) in self._layers.items():
            self._layers[layer] = k.repeat_interleave(width, 0), v.repeat_interleave(width, 0)
        self._seen_GWS = None if self._seen_GWS is None else self._seen_GWS.flatten(0, 1)[:, None]

    def _with_room(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, with room for the slots of this pass."""
        kept = self._layers[layer]
        missing = self.num_slots - kept[0].shape[2]
        if missing > 0:
            more = _room_for(self.num_slots) - kept[0].shape[2]
            k, v = (F.pad(x, (0, 0, 0, more)) for x in kept)
            self._layers[layer] = kept = (k, v)
        return kept

    def _forget_unseen(self, seen_GWS: Tensor) -> None:
        """Drop slots that no row sees, if they are the majority."""
        if self.num_slots < self._compact_at:
            return
        live_GS = seen_GWS.any(1)
        # This waits for the device. `_compact_at` makes it rare: the number of slots doubles between two checks.
        count = int(live_GS.sum(1).max())
        self._compact_at = 2 * count + MORE_ROOM
        if self.num_slots < self._compact_at:
            return
        # A stable sort puts visible slots first, in order. Groups with fewer of them keep some invisible ones.
        slots_GS = live_GS.sort(dim=1, descending=True, stable=True).indices[:, :count]
        self._seen_GWS = seen_GWS.gather(2, slots_GS[:, None].expand(-1, seen_GWS.shape[1], -1))
        self.num_slots = count
        for layer, kept in self._layers.items():
            index = slots_GS[:, None, :, None].expand(-1, kept[0].shape[1], -1, kept[0].shape[3])
            k, v = (x.gather(2, index) for x in kept)
            self._layers[layer] = (k, v)


def _room_for(slots: int) -> int:
    """Return the number of slots to allocate when ``slots`` are needed."""
    return slots + MORE_ROOM + slots // 2


def slots_taken(prompt: int, new: int, width: int) -> int:
    """Return the final number of allocated slots of a group.

    Args:
        prompt: tokens of the longest prompt.
        new: new tokens of each row.
        width: rows of a group.
    """
    # As `put` allocates and `_with_room` grows; a pass exceeds the room by at most `width` slots.
    room, needed = prompt + MORE_ROOM, prompt + new * width
    while room < needed:
        room = _room_for(room + width)
    return room


def _all(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device=device)
