"""Samplers and collation against torch.utils.data.

Rust draws random orders from another generator than PyTorch, so the rules are compared: which indices, how often, and
with which probability. Where the expected value is a probability, PyTorch's own draws are checked against it first.
"""

import torch
from harness import case
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler, default_collate

DRAWS = 40_000


def sigmas(probabilities, draws, count=5):
    """`count` standard deviations of the share of draws, for each of these probabilities."""
    return count * torch.sqrt(probabilities * (1 - probabilities) / draws)


def expect_shares(t, name, probabilities, pytorch):
    """Records expected probabilities, after checking that PyTorch's draws follow them."""
    slack = sigmas(probabilities, DRAWS)
    assert torch.all((pytorch / DRAWS - probabilities).abs() <= slack), (pytorch, probabilities)
    t.expect(name, probabilities, atol=slack.max().item())
    t.expect(f"{name}.possible", probabilities > 0)


@case
def sampler_distributed(t):
    """The parts of all ranks, one after the other, and the rules of a shuffled order."""
    grid = [(n, world) for n in (0, 1, 2, 3, 7, 10, 16, 101) for world in (1, 2, 3, 4, 8, 13)]
    t.tell("grid", grid)
    for n, world in grid:
        for drop_last in (False, True):
            ranks = [DistributedSampler(range(n), world, r, shuffle=False, drop_last=drop_last) for r in range(world)]
            name = f"{n}.{world}.{drop_last}".lower()
            t.expect(name, torch.tensor([list(rank) for rank in ranks], dtype=torch.int64))
            t.expect(f"{name}.len", torch.tensor([len(rank) for rank in ranks]))
    t.tell("shuffled", [10, 4])
    ranks = [DistributedSampler(range(10), 4, r, seed=5) for r in range(4)]
    orders = []
    for epoch in (0, 1):
        for rank in ranks:
            rank.set_epoch(epoch)
        orders.append(torch.tensor([list(rank) for rank in ranks]).T.flatten())
    t.expect("shuffled.all", orders[0][:10].sort().values)
    t.expect("shuffled.padded_from_the_start", orders[0][10:] == orders[0][:2])
    t.expect("shuffled.epochs_differ", torch.tensor(not torch.equal(*orders)))


@case
def sampler_batches(t):
    """How an order is cut into batches."""
    grid = [(n, size) for n in (0, 1, 5, 8, 9, 64) for size in (1, 2, 3, 8, 100)]
    t.tell("grid", grid)
    for n, size in grid:
        for drop_last in (False, True):
            sampler = BatchSampler(SequentialSampler(range(n)), size, drop_last)
            batches, name = list(sampler), f"{n}.{size}.{drop_last}".lower()
            t.expect(f"{name}.len", torch.tensor(len(sampler)))
            t.expect(f"{name}.sizes", torch.tensor([len(batch) for batch in batches], dtype=torch.int64))
            t.expect(name, torch.tensor([index for batch in batches for index in batch], dtype=torch.int64))


@case
def sampler_random(t):
    """Whole permutations one after the other and a part of one; draws with replacement; subsets."""
    n = 12
    counts = [1, 5, 12, 13, 24, 40]
    t.tell("counts", counts)
    for count in counts:
        order = torch.tensor(list(RandomSampler(range(n), num_samples=count)))
        whole = count // n * n
        t.expect(f"{count}.whole", order[:whole].view(-1, n).sort().values)
        t.expect(f"{count}.distinct", torch.tensor([count, len(order[whole:].unique())]))
    drawn = torch.tensor(list(RandomSampler(range(n), replacement=True, num_samples=DRAWS)))
    t.tell("draws", DRAWS)
    expect_shares(t, "replacement", torch.full((n,), 1 / n, dtype=torch.float64), drawn.bincount(minlength=n))
    indices = [9, 4, 4, 0, 77]
    t.tell("indices", indices)
    t.expect("subset", torch.tensor(list(SubsetRandomSampler(indices))).sort().values)


@case
def sampler_weighted(t):
    """Probabilities with replacement, of the first two draws without it, and which arguments are refused."""
    weights = torch.tensor([0.1, 0.0, 3.0, 1.0, 0.4, 5.5], dtype=torch.float64)
    t.tell("weights", weights.tolist())
    t.tell("draws", DRAWS)
    drawn = torch.tensor(list(WeightedRandomSampler(weights, DRAWS)))
    share = weights / weights.sum()
    expect_shares(t, "replacement", share, drawn.bincount(minlength=6))

    sampler = WeightedRandomSampler(weights, 2, replacement=False)
    pairs = torch.tensor([list(sampler) for _ in range(DRAWS)])
    joint = share[:, None] * (share[None, :] / (1 - share[:, None]))
    joint.fill_diagonal_(0)
    expect_shares(t, "successive", joint.flatten(), (pairs[:, 0] * 6 + pairs[:, 1]).bincount(minlength=36))
    all_of_them = list(WeightedRandomSampler(weights, 5, replacement=False))
    t.expect("successive.all", torch.tensor(all_of_them).sort().values)

    # JSON has no NaN and no infinity, so weights are sent as text. On the CPU, PyTorch draws weights of 0 when draws
    # without replacement need them; that case is left out, because it is an error in Rust.
    refused = []
    attempts = [
        (["1", "2"], 2, False), (["1", "-1"], 1, True), (["nan", "1"], 1, True), (["inf", "1"], 1, True),
        (["0", "0"], 1, True), (["0", "0"], 1, False), ([], 1, True), (["1", "2"], 3, False), (["1", "2"], 3, True),
        (["1", "2"], 0, True),
    ]
    for texts, count, replacement in attempts:
        try:
            list(WeightedRandomSampler([float(text) for text in texts], count, replacement))
            refused.append(False)
        except (RuntimeError, ValueError):
            refused.append(True)
    t.tell("attempts", attempts)
    t.expect("refused", torch.tensor(refused))


@case
def collate_stack(t):
    """Images and labels by default_collate; sequences packed for variable-length attention."""
    for channels in (1, 3, 4):
        images = torch.randint(0, 256, (5, 7, 6, channels), dtype=torch.uint8)
        t.give(f"images.{channels}", images)
        batch = [(image.permute(2, 0, 1), label) for image, label in zip(images, range(-2, 3))]
        stacked, labels = default_collate(batch)
        t.expect(f"stacked.{channels}", stacked)
        t.expect(f"labels.{channels}", labels)
    lengths = [5, 1, 0, 9]
    sequences = [torch.randint(0, 50_000, (length,)) for length in lengths]
    t.tell("sequences", [sequence.tolist() for sequence in sequences])
    t.expect("input_ids", torch.cat(sequences))
    t.expect("position_ids", torch.cat([torch.arange(length) for length in lengths]))
    ends = torch.tensor(lengths).cumsum(0, dtype=torch.int32)
    t.expect("cu_seqlens", torch.nn.functional.pad(ends, (1, 0)))
    clouds = t.give("clouds", torch.randn(3, 64, 5))
    t.expect("clouds", default_collate(list(clouds)))
    chosen = []
    for cloud in clouds[..., :3]:
        places, nearest = [0], torch.full((64,), torch.inf)
        for _ in range(15):
            nearest = torch.minimum(nearest, (cloud - cloud[places[-1]]).square().sum(-1))
            places.append(nearest.argmax().item())
        chosen.append(places)
    t.expect("farthest", torch.tensor(chosen))
