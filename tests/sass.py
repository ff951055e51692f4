"""What a kernel's machine code does with spilled registers: see `test_compile.py`."""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\d\s+)?(\S+)\s*([^;]*);")


class Instruction(NamedTuple):
    """One line of `cuobjdump -sass`."""

    address: int
    predicate: str
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """The address that it jumps to, if it does."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(found[1], 16) if found and self.name.startswith(("BRA", "CALL")) else None

    @property
    def slots(self) -> frozenset[int]:
        """What it loads or stores of the stack, each of four bytes."""
        found = re.search(r"\[R1(?:\+0x([0-9a-f]+))?\]", self.operands)
        if not self.name.startswith(("LDL", "STL")) or not found:
            return frozenset()
        width = re.search(r"\.(64|128)$", self.name)
        begin = int(found[1] or "0", 16)
        return frozenset(range(begin, begin + (int(width[1]) // 8 if width else 4), 4))


def instructions(sass: str) -> list[Instruction]:
    return [
        Instruction(int(address, 16), predicate.strip(), name, operands.strip())
        for address, predicate, name, operands in _LINE.findall(sass)
    ]


def local_accesses_in_product_loops(sass: str) -> int:
    """Loads and stores of spilled registers in any innermost loop that holds wgmma products."""
    lines = instructions(sass)
    at = {line.address: i for i, line in enumerate(lines)}
    loops = []
    for i, line in enumerate(lines):
        begin = at.get(line.target, i)
        if line.name.startswith("BRA") and begin < i:
            # waits that fail go on behind the end, and come back from there: those are no loops
            inside = [each.name for each in lines[begin:i]]
            if "EXIT" not in inside and any(name.startswith("HGMMA") for name in inside):
                loops.append(range(begin, i))
    inner = [
        outer
        for outer in loops
        if not any(body != outer and set(body) <= set(outer) for body in loops)
    ]
    assert inner, "no loop of products was found"
    return max(sum(lines[j].name.startswith(("LDL", "STL")) for j in body) for body in inner)


def loads_before_stores(sass: str) -> list[Instruction]:
    """Loads of spilled registers that some way through the kernel reaches before they are stored.

    ptxas has made such: what two loops compute alike was computed and spilled before the first,
    loaded in both, and the first was skipped where it had no turns. Not counted are registers that
    collect predicates, whose bits are stored before they mean something.
    """
    lines = instructions(sass)
    at = {line.address: i for i, line in enumerate(lines)}
    known: dict[int, frozenset[int]] = {}  # slots stored on every way to a line
    todo = [(0, frozenset[int]())]
    jumps = [i for i, line in enumerate(lines) if line.name.startswith("BRX")]
    while True:
        while todo:
            i, stored = todo.pop()
            if i in known and known[i] <= stored:
                continue
            known[i] = stored & known.get(i, stored)
            line, after = lines[i], known[i]
            if line.name.startswith("STL") and not line.predicate:
                after |= line.slots
            todo += [(j, after) for j in _next(lines, at, i)]
        # a partition begins where nothing but a jump by its number leads
        beginnings = [i for i in range(len(lines)) if i not in known]
        if not beginnings or not jumps:
            break
        todo = [(beginnings[0], known[jumps[0]])]
    return [
        line
        for i, line in enumerate(lines)
        if line.name.startswith("LDL") and i in known
        if not line.slots <= known[i] and not _collects_predicates(lines, i)
    ]


def _next(lines: list[Instruction], at: dict[int, int], i: int) -> list[int]:
    """Where control may go from a line."""
    line = lines[i]
    goes_on = bool(line.predicate) or not line.name.startswith(("BRA", "EXIT", "RET", "BRX"))
    if line.name.startswith("BRA"):  # on a predicate among its operands, or on divergence
        goes_on = goes_on or ".DIV" in line.name or re.search(r"\bU?P\d", line.operands) is not None
    targets = [] if line.target is None else [at[line.target]]
    return targets + [i + 1] * (goes_on and i + 1 < len(lines))


def _collects_predicates(lines: list[Instruction], i: int) -> bool:
    """Whether what is loaded first has one bit cleared, to be set by a predicate."""
    register = lines[i].operands.split(",")[0]
    uses = [line for line in lines[i + 1 :] if re.search(rf"\b{register}\b", line.operands)]
    clears = re.compile(rf"{register}, {register}, 0xf[0-9a-f]{{7}}, RZ, 0xc0,")
    return bool(uses) and uses[0].name == "LOP3.LUT" and bool(clears.match(uses[0].operands))
