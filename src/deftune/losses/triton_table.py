# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""What a call tells the kernels of a graph, which outlives it: a table on the device, read by the kernels."""

from __future__ import annotations

import triton
import triton.language as tl

# Its slots: pointers, but for the number of tokens, the first row of the next chunk, the first of the one at hand, the
# stride of the record's planes and the scale
TARGETS, TOKENS, EARLIER, PLACES, LABELS, FACTS, HIDDEN, START = (tl.constexpr(slot) for slot in range(8))
CHUNK, OUT, T, RECORD, PITCH, LIKELIEST, SCALE = (tl.constexpr(slot) for slot in range(8, 15))


@triton.jit
def told_pointer(table_ptr, slot: tl.constexpr, TYPE: tl.constexpr):
    # a pointer that a call has told; all but the flags are on 16 bytes
    return tl.multiple_of(tl.load(table_ptr + slot).to(tl.pointer_type(TYPE)), 16)
