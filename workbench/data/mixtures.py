"""Several sources as one data set: one data type, one set of columns, an order that depends on the seed alone."""

import itertools
import logging
from functools import partial
from typing import Any, Literal

from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets

from workbench.data import rows as arrow
from workbench.data.conversions import canonicalise, column_names, iterate
from workbench.data.formats import detect_type
from workbench.data.jsontext import decode_row
from workbench.errors import UserError, check_choice

log = logging.getLogger(__name__)

Rows = Dataset | IterableDataset
Interleave = Literal["concatenate", "first_exhausted", "all_exhausted"]
INTERLEAVE = ("concatenate", "first_exhausted", "all_exhausted")


def mix(datasets: list[Any], labels: list[str], weights: list[float | None], interleave: Interleave | None, seed: int) -> Rows:
    """One data set of several.

    Args:
        datasets: all map-style or all streaming.
        labels: how messages call each.
        weights: share of each when rows are drawn; None counts as 1. Weights are relative to each other.
        interleave: ``concatenate`` (one after the other; the default without weights), ``first_exhausted`` (draw the
            source of each row by weight, stop when one source has given its last; the default with weights) or
            ``all_exhausted`` (go on until every source has given its last; shorter ones start over).
        seed: of the draw.
    """
    if interleave is None:
        interleave = "concatenate" if all(w is None for w in weights) else "first_exhausted"
    check_choice("interleave", interleave, INTERLEAVE)
    if interleave == "concatenate" and any(w is not None for w in weights):
        raise UserError("weight has no effect with interleave=concatenate; use first_exhausted or all_exhausted.")
    for weight, label in zip(weights, labels, strict=True):
        if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0):
            raise UserError(f"weight={weight!r} of {label} must be a number above 0; to skip a source, leave it out.")
    datasets = unify(datasets, labels)
    if len(datasets) == 1:
        return datasets[0]
    if interleave == "concatenate":
        return concatenate_datasets(datasets)
    shares = [1.0 if w is None else float(w) for w in weights]
    probabilities = [share / sum(shares) for share in shares]
    # always with probabilities: without them map-style and streaming data sets stop at different rows
    return interleave_datasets(datasets, probabilities=probabilities, seed=seed, stopping_strategy=interleave)


def unify(datasets: list[Any], labels: list[str]) -> list[Rows]:
    """The data sets with one schema. If they differ, their rows are normalised first and get each other's columns."""
    types = [detect_type(column_names(dataset)) for dataset in datasets]
    if len(set(types)) > 1:
        listed = ", ".join(f"{label}: {data_type}" for label, data_type in zip(labels, types, strict=True))
        raise UserError(f"The sources of a mixture must have one data type; set convert on some of them. {listed}.")
    if all(d.features is not None and d.features == datasets[0].features for d in datasets):
        return datasets
    normal = [canonicalise(dataset, types[0]) for dataset in datasets]
    kinds: arrow.Kinds = {}
    for dataset in normal:
        kinds = arrow.merge_columns(kinds, arrow.scan(_decoded(dataset)))
    return [_fit(dataset, kinds) for dataset in normal]


def _decoded(dataset: Rows) -> Any:
    rows = iterate(dataset) if isinstance(dataset, Dataset) else itertools.islice(dataset, arrow.PEEK)
    return (decode_row(row) for row in rows)


def _fit(dataset: Rows, kinds: arrow.Kinds) -> Rows:
    if isinstance(dataset, Dataset):
        if arrow.to_features(kinds) == dataset.features:
            return dataset
        key = None
        if dataset.cache_files:
            key = arrow.cache_key(dataset._fingerprint, kinds)
        return arrow.build(lambda: _decoded(dataset), kinds=kinds, key=key)
    features = arrow.to_features(kinds, "encode")
    return dataset.map(partial(_encode, kinds=kinds), with_indices=True, features=features)


def _encode(row: dict, index: int, kinds: arrow.Kinds) -> dict:
    return arrow.encode_row(decode_row(row), kinds, "encode", index)
