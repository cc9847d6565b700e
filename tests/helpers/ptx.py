"""What the PTX of a kernel does with global memory: how wide it loads, and what happens between barriers.

PTX is followed, not run. An address belongs to the pointer parameters that it was computed from, registers back; one
that was itself loaded from memory belongs to none.
"""

import re
from dataclasses import dataclass
from functools import cached_property

LINE = re.compile(
    r"^\s*(?:(?P<label>\$\w+):|(?P<guard>@!?%p\d+)?\s*(?P<op>[a-z]+[.\w:]*)\s*(?P<operands>[^;]*);)", re.M
)
POINTER = re.compile(r"\.param \.u64 \.ptr \.global[^,)]*_param_(\d+)")
REGISTER = re.compile(r"%\w+")
ATOMIC = -1  # among the numbers of parameters
ELEMENT = re.compile(r"\.v(\d)|\.[bsuf](\d+)")


@dataclass
class Step:
    """One instruction."""

    op: str
    operands: str
    is_guarded: bool

    @property
    def kind(self) -> str:
        """L: a load from global memory, S: a store there, A: an atomic, B: a barrier of all threads; else empty."""
        kinds = {"ld.global": "L", "cp.async.ca": "L", "cp.async.cg": "L", "st.global": "S"}
        kinds |= {"atom.": "A", "red.global": "A", "bar.sync": "B", "barrier.sync": "B"}
        return next((kind for prefix, kind in kinds.items() if self.op.startswith(prefix)), "")

    @property
    def width(self) -> int:
        """Bytes that a thread loads or stores."""
        if self.op.startswith("cp.async"):
            return int(self.operands.split(",")[2], 16)
        numbers = {bool(count): int(count or bits) for count, bits in ELEMENT.findall(self.op)}
        return numbers.get(True, 1) * numbers[False] // 8

    @property
    def address(self) -> str:
        """The register of a global address, behind any shared one."""
        return REGISTER.findall(self.operands.split("[")[-1])[0]


class Ptx:
    """The instructions of a kernel, and where each may go on."""

    def __init__(self, text: str) -> None:
        self.pointers = {int(number) for number in POINTER.findall(text)}
        self.steps: list[Step] = []
        self._labels: dict[str, int] = {}
        for match in LINE.finditer(text[text.index("{\n") :]):
            if match["label"]:
                self._labels[match["label"]] = len(self.steps)
            else:
                self.steps.append(Step(match["op"], match["operands"], match["guard"] is not None))

    @cached_property
    def _definitions(self) -> dict[str, list[Step]]:
        """Instructions by the registers that they set."""
        definitions: dict[str, list[Step]] = {}
        for step in self.steps:
            for register in REGISTER.findall(targets(step.operands)):
                definitions.setdefault(register, []).append(step)
        return definitions

    def parameters(self, step: Step) -> set[int]:
        """Return the numbers of the pointer parameters that the address of an access was computed from."""
        found, seen, waiting = set(), set(), [step.address]
        while waiting:
            register = waiting.pop()
            if register in seen:
                continue
            seen.add(register)
            for definition in self._definitions.get(register, []):
                if definition.op.startswith("ld.param"):
                    found.add(int(re.findall(r"_param_(\d+)", definition.operands)[0]))
                elif not definition.op.startswith(("ld.", "atom.")):
                    waiting += REGISTER.findall(definition.operands[len(targets(definition.operands)) :])
        return found & self.pointers

    def load_widths(self) -> dict[int, list[int]]:
        """Return the bytes that a thread loads at once, by parameter (-1: none): all widths that occur, in order."""
        widths: dict[int, set[int]] = {}
        for step in self.steps:
            if step.kind == "L":
                for parameter in self.parameters(step) or {-1}:
                    widths.setdefault(parameter, set()).add(step.width)
        return {parameter: sorted(found) for parameter, found in widths.items()}

    def unfenced(self) -> set[tuple[str, int]]:
        """Return what some path does with no barrier between.

        "load": it stores to a parameter and loads from there. "publish": it stores there, and one thread tells other
        programs by an atomic. "arrive": it loads from there behind an atomic, which all but one thread pass by.
        """
        found: set[tuple[str, int]] = set()
        states: list[set[int] | None] = [None] * len(self.steps)
        waiting: list[tuple[int, set[int]]] = [(0, set())]
        while waiting:
            place, arriving = waiting.pop()
            if place >= len(self.steps) or (states[place] is not None and arriving <= (states[place] or set())):
                continue
            state = (states[place] or set()) | arriving
            states[place] = state
            step = self.steps[place]
            parameters = self.parameters(step) if step.kind in ("L", "S") else set()
            match step.kind:
                case "B":
                    state = set()
                case "L":
                    found |= {("load", number) for number in parameters & state}
                    found |= {("arrive", number) for number in parameters if ATOMIC in state}
                case "S":
                    state = state | parameters
                case "A":
                    found |= {("publish", number) for number in state - {ATOMIC}}
                    state = state | {ATOMIC}
            waiting += [(next_place, state) for next_place in self._next(place)]
        return found

    def _next(self, place: int) -> list[int]:
        step = self.steps[place]
        if step.op in ("ret", "exit", "trap"):
            return [place + 1] if step.is_guarded else []
        if step.op.startswith("bra"):
            return [self._labels[step.operands.strip()], *([place + 1] if step.is_guarded else [])]
        return [place + 1]


def targets(operands: str) -> str:
    """Return the part of the operands that an instruction sets: a register, or several in braces."""
    return operands[: operands.index("}") + 1] if operands.startswith("{") else operands.split(",")[0]
