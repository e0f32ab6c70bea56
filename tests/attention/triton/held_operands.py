"""What the machine code of a Hopper kernel does to operands of its products that it holds in registers."""

import re


def held_operands(sass: str) -> dict:
    """Products in innermost loops whose operand in registers is made before them: how many, and those that are spoilt.

    Nothing may write such an operand between the load that makes it and the last pass: not its loop, nor those loops
    around it that do not hold the load. One that a pass makes for the next would count as spoilt.
    """
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(.*?)\s*;", line):
            code.append(instruction[1])
    jumps = {n: labels[to[1]] for n, x in enumerate(code) if (to := re.match(r"BRA.*`\((\.L_x_\d+)\)", x))}
    loops = [range(begin, end + 1) for end, begin in jumps.items() if begin <= end]
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
