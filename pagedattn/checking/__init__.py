"""Is this attention right? Inputs, a float64 answer, a derived tolerance, and the check command.

Works on anything that computes attention of a `Step`; knows no backend but the oracle.
"""

from pagedattn.checking.mismatch import Mismatch, ShadowMismatch
from pagedattn.checking.shadow import Shadow

__all__ = ["Mismatch", "Shadow", "ShadowMismatch"]
