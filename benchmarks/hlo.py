"""What a compiled program does between chips and with its host, read from its HLO text.

Needs nothing but the text, which is that of one chip: shapes are those of its part.
"""

import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
HOST = ("send", "recv", "infeed", "outfeed")
HOST_CALL = re.compile(r"host|callback|outfeed|infeed", re.I)
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "token": 0}  # others: the digits of their name over 8
SHAPE = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\]")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
CALLED = re.compile(
    r"(body|condition|calls|to_apply|branch_computations|\w+_computation)=\{?([^,}]*(?:, ?%[^,}]*)*)"
)


class Instruction(NamedTuple):
    """One line of a computation."""

    computation: str
    name: str
    shape: str  # as it stands there, of what it returns
    op: str
    rest: str  # operands and attributes


class Collective(NamedTuple):
    """An exchange between chips."""

    kind: str
    bytes: int  # of what one chip has of it afterwards
    in_loop: bool  # whether a loop repeats it
    shape: str


def parse_instructions(text: str) -> list[Instruction]:
    """Returns the instructions of all computations of a module."""
    found, inside = [], ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            inside = match[2]
        elif match := INSTRUCTION.match(line):
            found.append(Instruction(inside, *match.groups()))
    return found


def shape_sizes(shape: str) -> list[tuple[int, int]]:
    """Returns (elements, bytes) of each array of a shape, which may be a tuple."""
    sizes = []
    for kind, dimensions in SHAPE.findall(shape):
        elements = math.prod(int(size) for size in dimensions.split(",") if size)
        width = BYTES.get(kind) or -(-int(re.sub(r"\D.*", "", kind.lstrip("fsuc")) or 8) // 8)
        sizes.append((elements, 0 if kind == "token" else elements * width))
    return sizes


def find_loops(instructions: list[Instruction]) -> set[str]:
    """Returns the computations that a loop repeats, whether directly or not."""
    calls, bodies = defaultdict(set), set()
    for each in instructions:
        for attribute, names in CALLED.findall(each.rest):
            called = {name.strip().lstrip("%") for name in names.split(",")}
            calls[each.computation] |= called
            if attribute == "body":
                bodies |= called
    repeated, pending = set(), list(bodies)
    while pending:
        name = pending.pop()
        if name not in repeated:
            repeated.add(name)
            pending += calls[name]
    return repeated


def find_collectives(text: str) -> list[Collective]:
    """Returns the exchanges between chips of a compiled program.

    An exchange that a TPU does in pieces, beside other work, stands in the text of each
    piece, always with the same channel, as one of a chain: it is counted once.
    """
    instructions = parse_instructions(text)
    loops, found, seen = find_loops(instructions), [], set()
    for each in instructions:
        kind = each.op.removesuffix("-start")
        channel = "chain_id" in each.rest and re.search(r"channel_id=(\d+)", each.rest)
        if kind not in KINDS or (channel and channel[1] in seen):
            continue
        seen |= {channel[1]} if channel else set()
        sizes = [size for _, size in shape_sizes(each.shape)]
        if each.op.endswith("-start") and each.shape.startswith("("):
            # operands, results, and what else the transfer needs
            sizes = [max(sizes)] if kind != "all-reduce" else sizes
        found.append(Collective(kind, sum(sizes), each.computation in loops, each.shape))
    return found


def count_collectives(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """Returns kind -> (how many, bytes of all of them)."""
    return {
        kind: (len(own), sum(each.bytes for each in own))
        for kind in KINDS
        if (own := [each for each in found if each.kind == kind])
    }


def find_host_transfers(text: str) -> list[str]:
    """Returns the instructions that exchange something with the host, by operation."""
    found = []
    for each in parse_instructions(text):
        target = re.search(r'custom_call_target="([^"]*)"', each.rest)
        if each.op.removesuffix("-done") in HOST or (target and HOST_CALL.search(target[1])):
            found.append(target[1] if target else each.op)
        elif "S(5)" in each.shape:
            found.append(f"{each.op} in the host's memory")
    return found


def count_arrays(text: str, elements: set[int]) -> dict[str, int]:
    """Returns shape -> number of the instructions that return an array of so many elements."""
    return Counter(
        each.shape.split("{")[0]
        for each in parse_instructions(text)
        if not each.shape.startswith("(") and any(n in elements for n, _ in shape_sizes(each.shape))
    )


FREE = ("parameter", "get-tuple-element", "tuple", "constant", "bitcast", "after-all")
PRODUCTS = ("dot", "convolution")
MOVES = ("copy", "transpose")


def is_product(each: Instruction) -> bool:
    """Returns whether an instruction multiplies matrices, by a library of the GPU's perhaps."""
    if each.op == "custom-call":
        return re.search(r"gemm|matmul|__cudnn", each.rest) is not None
    return each.op in PRODUCTS


def find_step_loops(text: str) -> list[tuple[int, int]]:
    """Returns (operations, of them copies and transposes) of the body of each loop that
    multiplies matrices, as a step of training does, without those of loops within; a fusion
    is one operation, and none is what only names arrays.
    """
    own, bodies, calls = defaultdict(list), set(), defaultdict(set)
    for each in parse_instructions(text):
        own[each.computation].append(each)
        for attribute, names in CALLED.findall(each.rest):
            called = {name.strip().lstrip("%") for name in names.split(",")}
            calls[each.computation] |= called
            bodies |= called if attribute == "body" else set()

    def reach(name: str) -> set[str]:
        found, pending = set(), [name]
        while pending:
            if (one := pending.pop()) not in found:
                found.add(one)
                pending += calls[one] - bodies
        return found

    def moves(each: Instruction) -> bool:
        inside = [one.op for name in CALLED.findall(each.rest) for one in own[name[1].lstrip("%")]]
        real = [op for op in inside if op not in FREE]
        return each.op in MOVES or (each.op == "fusion" and bool(real) and set(real) <= set(MOVES))

    loops = []
    for body in bodies:
        if any(is_product(each) for name in reach(body) for each in own[name]):
            work = [each for each in own[body] if each.op not in FREE]
            loops.append((len(work), sum(map(moves, work))))
    return loops


def sum_cycles(text: str) -> tuple[int, int]:
    """Returns the cycles that the TPU's compiler expects of all instructions, those of loops
    counted once, and of the instructions in loops.
    """
    instructions = parse_instructions(text)
    loops, total, repeated = find_loops(instructions), 0, 0
    for each in instructions:
        if match := re.search(r'"estimated_cycles":"(\d+)"', each.rest):
            total += int(match[1])
            repeated += int(match[1]) * (each.computation in loops)
    return total, repeated
