"""Says what is wrong with a schedule of chains of units on identical devices, from the definition of one."""

import itertools
from collections import Counter


def faults(placements, chains, num_devices):
    """Every rule that is broken, one sentence each; times may differ by rounding."""
    found = []
    placed = Counter((placement.chain, placement.index) for placement in placements)
    if placed != Counter((name, index) for name, chain in chains.items() for index in range(len(chain))):
        found.append(f"the units placed are {placed}")
    for placement in placements:
        where = f"{placement.chain}/{placement.index}"
        if placement.seconds != chains[placement.chain][placement.index]:
            found.append(f"{where} takes {placement.seconds}")
        if placement.start_seconds < 0:
            found.append(f"{where} starts at {placement.start_seconds}")
        if placement.device not in range(num_devices):
            found.append(f"{where} is on device {placement.device}")
    for one, other in itertools.combinations(placements, 2):
        first, second = sorted((one, other), key=lambda placement: (placement.start_seconds, placement.index))
        overlap = first.end_seconds - second.start_seconds > 1e-9 * max(1.0, first.end_seconds)
        names = f"{first.chain}/{first.index} and {second.chain}/{second.index}"
        if overlap and first.device == second.device:
            found.append(f"{names} are on device {first.device} at once")
        if overlap and first.chain == second.chain:
            found.append(f"{names} run at once")
        if first.chain == second.chain and first.index > second.index:
            found.append(f"{names} are out of order")
    return found
