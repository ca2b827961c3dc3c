"""Several sources as one data set: one data type, one set of columns, an order that depends on the seed alone."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets

from workbench.data.conversions import canonicalise, column_names
from workbench.data.formats import ALIASES, SYSTEM_COLUMNS, WITHOUT_TRIPLES, detect_type
from workbench.data.jsontext import decode_value, encode_value
from workbench.data.streams import Draw, stream_of
from workbench.errors import UserError, check_choice

Rows = Dataset | IterableDataset
Interleave = Literal["concatenate", "first_exhausted", "all_exhausted"]
INTERLEAVE = ("concatenate", "first_exhausted", "all_exhausted")
# Columns whose mere presence changes how a row is read, so that no other source may get them.
_OTHER_SHAPES = {*ALIASES, *SYSTEM_COLUMNS, "instruction", "image"}


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
    draw = Draw([1.0 if w is None else float(w) for w in weights], seed, interleave == "all_exhausted")
    if isinstance(datasets[0], Dataset):
        return concatenate_datasets(datasets).select(draw.order([len(dataset) for dataset in datasets]))
    return stream_of(draw.rows, datasets)


def unify(datasets: list[Any], labels: list[str]) -> list[Rows]:
    """The data sets with columns that fit together.

    Columns of other names (instruction, conversations, system, ...) are normalised first. A column that differs in type
    between sources becomes one of numbers if it holds numbers, else one of text with `encode_value`.
    """
    types = [detect_type(column_names(dataset), WITHOUT_TRIPLES) for dataset in datasets]
    if len(set(types)) > 1:
        listed = ", ".join(f"{label}: {data_type}" for label, data_type in zip(labels, types, strict=True))
        raise UserError(f"The sources of a mixture must have one data type; set convert on some of them. {listed}.")
    if all(dataset.features == datasets[0].features for dataset in datasets):
        return datasets
    datasets = [canonicalise(d, types[0]) if _OTHER_SHAPES & set(column_names(d)) else d for d in datasets]
    names = dict.fromkeys(name for dataset in datasets for name in dataset.features)
    target = {name: _common([d.features[name] for d in datasets if name in d.features]) for name in names}
    return [_fit(dataset, target) for dataset in datasets]


def _common(features: list[Any]) -> Any:
    features = [feature for feature in features if feature != Value("null")] or [Value("string")]
    if all(feature == features[0] for feature in features):
        return features[0]
    return Value("float64") if all(_is_number(feature) for feature in features) else Value("string")


def _is_number(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype.startswith(("int", "uint", "float"))


def _fit(dataset: Rows, target: dict[str, Any]) -> Rows:
    streaming = isinstance(dataset, IterableDataset)
    changed = {name: target[name] for name, feature in dataset.features.items() if feature != target[name]}
    missing = [name for name in target if name not in dataset.features] if streaming else []  # else concatenating adds them
    if not changed and not missing:
        return dataset
    texts = [name for name, feature in changed.items() if feature == Value("string")]
    convert = partial(_convert, texts=texts, numbers=[name for name in changed if name not in texts], missing=missing)
    features = Features(target if streaming else {**dataset.features, **changed})
    # one row at a time in a stream, so that its position is exact when a run is resumed
    return dataset.map(convert, batched=True, batch_size=1 if streaming else 1000, features=features)


def _convert(batch: Mapping[str, list], texts: list[str], numbers: list[str], missing: list[str]) -> dict[str, list]:
    size = len(next(iter(batch.values())))
    return {
        **{name: [encode_value(decode_value(value)) for value in batch[name]] for name in texts},
        **{name: [None if value is None else float(value) for value in batch[name]] for name in numbers},
        **{name: [None] * size for name in missing},
    }
