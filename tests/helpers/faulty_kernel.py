"""A kernel in which each thing can be wrong that the proofs about kernels look for: their negative control."""

import triton
import triton.language as tl


@triton.jit
def add_blocks(x, doubled, counter, total, size, FAULT: tl.constexpr, N: tl.constexpr):
    """Double x [size] in blocks of N; the last program to arrive stores the sum of the blocks in total [N].

    `doubled` is as long as all blocks, `counter` one int32 that is 0. FAULT: "" or a name of FAULTS.
    """
    block = tl.program_id(0)
    i = tl.arange(0, N)
    inside = block * N + i < size
    if FAULT == "leaves":
        inside = i < N
    values = 2 * tl.load(x + block * N + i, mask=inside, other=0.0)
    if FAULT == "twice":
        tl.store(doubled + block * N + i // 2, values)
    elif FAULT == "meets":
        tl.store(doubled + i, values)
    elif FAULT == "gap":
        tl.store(doubled + block * N + i, values, mask=inside)
    else:
        tl.store(doubled + block * N + i, values)
    if FAULT != "unfenced":
        tl.debug_barrier()

    arrived = tl.atomic_add(counter, 1, sem="relaxed" if FAULT == "relaxed" else "acq_rel")
    wanted = tl.num_programs(0) - 1
    if FAULT == "early":
        wanted = 1
    if arrived == wanted:
        sum_of_blocks = tl.zeros((N,), tl.float32)
        for other in range(tl.num_programs(0)):
            sum_of_blocks += tl.load(doubled + other * N + i)
        tl.store(total + i, sum_of_blocks)
        tl.store(counter, 0)
        if FAULT == "reads back":
            tl.store(total + i, 2 * tl.load(total + N - 1 - i))
        if FAULT == "turns":
            tl.store(doubled + i, tl.load(doubled + N - 1 - i))


FAULTS = {
    "leaves": "leaves the tensor",
    "twice": "stores twice to one place",
    "meets": "writes what another program writes",
    "gap": "reads memory that nothing was written to",
    "unfenced": "reads what another program writes",
    "relaxed": "reads what another program writes",
    "early": "writes what another program reads",
    "reads back": "loads what it stored, with no barrier between",
    "turns": "overwrites what another thread loads, with no barrier between",
}
