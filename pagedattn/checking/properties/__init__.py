"""The properties of right attention by name, each a relation that is tried on drawn steps."""

from pagedattn.checking.properties.agreement import AGREEMENT
from pagedattn.checking.properties.base import Answer, Finding, Property, Trial
from pagedattn.checking.properties.graph import GRAPH_REPLAY
from pagedattn.checking.properties.layout import PAGE_RENAMING, PAGE_SIZE, POISON
from pagedattn.checking.properties.mathematics import (
    CONSTANT_VALUES,
    REPEATED_HEADS,
    SCORE_SHIFT,
    ZERO_QUERY,
)
from pagedattn.checking.properties.objects import BAD_METADATA, NO_HOST_SYNC
from pagedattn.checking.properties.options import OPTION_EFFECT, OPTIONS_IN_TURN
from pagedattn.checking.properties.requests import IDENTICAL_REQUESTS, ISOLATION, REQUEST_ORDER
from pagedattn.checking.properties.rows import DECODE_ROW, MERGED_CHUNKS

__all__ = ["AGREEMENT", "PROPERTIES", "Answer", "Finding", "Property", "Trial"]

PROPERTIES = {
    each.name: each
    for each in (
        AGREEMENT,
        PAGE_RENAMING,
        PAGE_SIZE,
        POISON,
        REQUEST_ORDER,
        ISOLATION,
        IDENTICAL_REQUESTS,
        DECODE_ROW,
        MERGED_CHUNKS,
        SCORE_SHIFT,
        CONSTANT_VALUES,
        ZERO_QUERY,
        REPEATED_HEADS,
        OPTION_EFFECT,
        OPTIONS_IN_TURN,
        GRAPH_REPLAY,
        BAD_METADATA,
        NO_HOST_SYNC,
    )
}
"""By name; the first is what every other one relies on."""
