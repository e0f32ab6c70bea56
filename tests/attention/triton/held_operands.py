"""What a kernel does to operands of its products before these have read them, and what it keeps in memory meanwhile."""

import re
from collections import Counter
from functools import lru_cache
from itertools import product


@lru_cache(maxsize=1)
def code_and_loops(sass: str) -> tuple[list[str], list[range]]:
    """The instructions that nvdisasm prints, without guards, and the loops among them."""
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(.*?)\s*;", line):
            code.append(instruction[1])
    jumps = {n: labels[to[1]] for n, x in enumerate(code) if (to := re.match(r"BRA.*`\((\.L_x_\d+)\)", x))}
    return code, [range(begin, end + 1) for end, begin in jumps.items() if begin <= end]


def kept_in_memory(sass: str) -> int:
    """Reads and writes of registers that are kept in memory, in the innermost loops of those that hold a product."""
    code, loops = code_and_loops(sass)
    products = [n for n, instruction in enumerate(code) if re.match(r"\w*MMA\b", instruction)]
    loops = [loop for loop in loops if any(n in loop for n in products)]
    inner = [loop for loop in loops if not any(x != loop and x[0] in loop and x[-1] in loop for x in loops)]
    moves = [n for n, instruction in enumerate(code) if re.match(r"(?:LDL|STL)\b", instruction)]
    return sum(any(n in loop for loop in inner) for n in moves)


def held_operands(sass: str) -> dict:
    """Products in innermost loops whose operand in registers is made before them: how many, and those that are spoilt.

    Nothing may write such an operand between the load that makes it and the last pass: not its loop, nor those loops
    around it that do not hold the load. One that a pass makes for the next would count as spoilt.
    """
    code, loops = code_and_loops(sass)
    writes = {}  # of a register: where
    for n, instruction in enumerate(code):
        if (to := re.match(r"(\S+) (?:U?P[T\d]+, )?R(\d+)\b", instruction)) and not to[1].startswith(
            ("ST", "BAR", "RED")
        ):
            columns = re.match(r"HGMMA\.64x(\d+)x", to[1])
            wide = 4 if re.search(r"\.128|\.M88\.4", to[1]) else 2 if re.search(r"\.64|WIDE", to[1]) else 1
            for register in range(int(to[2]), int(to[2]) + (int(columns[1]) // 2 if columns else wide)):
                writes.setdefault(register, []).append(n)
    held, spoilt = 0, []
    for loop in loops:
        if any(other != loop and other[0] in loop and other[-1] in loop for other in loops):
            continue
        around = sorted((each for each in loops if loop[0] in each and loop[-1] in each), key=len)
        for n in loop:
            if not (operand := re.match(r"HGMMA\S* R\d+, R(\d+)", code[n])):
                continue
            registers = range(int(operand[1]), int(operand[1]) + 4)
            inside = [[at for at in writes.get(register, ()) if at in loop] for register in registers]
            if all(some and some[0] < n for some in inside):
                continue  # made in the same pass
            held += 1
            for each in around:
                within = [at for register in registers for at in writes.get(register, ()) if at in each]
                if any(code[at].startswith("LDSM") for at in within):
                    break
                if within:
                    spoilt.append(code[n])
                    break
    return {"held": held, "spoilt": spoilt}


def overwritten_tiles(ttgir: str) -> list[str]:
    """Tiles in shared memory that a pass of an innermost loop writes while a product may still read them.

    A product runs on until a wait leaves fewer behind it. A tile is one of `count` slots, which the passes take in
    turn; a copy fills that of as many passes ahead as copies stand before the loop.
    """
    lines = ttgir.splitlines()
    tile_of, counts = {}, {}
    for line in lines:
        if made := re.match(r"\s*(%\S+) = ttg\.local_alloc (:?).*?memdesc<(\d+)x", line):
            tile_of[made[1]], counts[made[1]] = made[1], int(made[3]) if made[2] else 1
        elif (view := re.match(r"\s*(%\S+) = ttg\.memdesc_\w+ (%[\w#]+)", line)) and view[2] in tile_of:
            tile_of[view[1]] = tile_of[view[2]]

    def written(line: str) -> str | None:
        into = re.match(r"\s*(%\S+) = ttg\.local_alloc %", line)
        into = into or re.search(r"async_copy_global_to_local %\S+, (%[\w#]+)", line)
        return tile_of.get(into[1]) if into else None

    loops = []
    for n, line in enumerate(lines):
        if " scf.for " in line:
            end = " " * (len(line) - len(line.lstrip())) + "}"
            loops.append(range(n, next(m for m in range(n, len(lines)) if lines[m].startswith(end)) + 1))
    found = set()
    for loop in loops:
        if any(other[0] in loop for other in loops if other != loop):
            continue
        ahead = Counter(written(line) for line in lines[: loop[0]] if "async_copy" in line)
        running = []  # of products that may not have ended: the pass, and the tiles that they read
        for n, line in product(range(4), lines[loop[0] + 1 : loop[-1]]):
            if reads := re.search(r"warp_group_dot (%[\w#]+), (%[\w#]+),.*isAsync = true", line):
                running.append((n, {tile_of.get(each) for each in reads.groups()}))
            elif wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
                running = running[max(0, len(running) - int(wait[1])) :]
            elif tile := written(line):
                same = [(n + ahead[tile] - m) % counts[tile] == 0 for m, tiles in running if tile in tiles]
                found |= {tile} if any(same) else set()
    return sorted(found)


def transposed_products(ttgir: str) -> list[str]:
    """Results of products that are transposed in registers.

    As the left operand of another product those of 64 columns came out wrong on Hopper with Triton 3.4 to 3.7.0
    (flash-linear-attention's issue 640).
    """
    return re.findall(r"(%\w+) = tt\.trans .*: tensor<[^>]*#mma\w*>", ttgir)


def narrow_products(ttgir: str) -> list[str]:
    """Products of mma.sync whose operands lie wider than they are.

    Four threads hold `kWidth` numbers each, side by side. Where these are more than the left operand has columns, the
    result is wrong: on an H200 dq of 16 keys with 8 numbers, while 16 with 4 were right.
    """
    registers = re.findall(r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2", ttgir, re.MULTILINE)
    lefts = r"tt\.dot .*?: (tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = (#\w+), kWidth = (\d+)\}>>)"
    return sorted(
        {
            left
            for left, columns, parent, width in re.findall(lefts, ttgir)
            if parent in registers and 4 * int(width) > int(columns)
        }
    )
