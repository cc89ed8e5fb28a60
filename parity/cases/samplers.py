"""Samplers and collation against torch.utils.data.

Unless asked for PyTorch's order, Rust draws random orders from another generator, so the rules are compared: which
indices, how often, and with which probability. Where the expected value is a probability, PyTorch's own draws are
checked against it first.
"""

import torch
from harness import case
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler, default_collate, random_split

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


def torch_loader(config, generator):
    """A loader over the numbers below n, with the sampler that the configuration names."""
    data, kind = range(config["n"]), config["kind"]
    options = {"batch_size": config["batch"], "drop_last": config["drop_last"], "generator": generator}
    samplers = {
        "sequential": lambda: None,
        "shuffle": lambda: None,
        "random": lambda: RandomSampler(data, config["replacement"], config["num_samples"], generator),
        "subset": lambda: SubsetRandomSampler(config["indices"], generator),
        "weighted": lambda: WeightedRandomSampler(
            config["weights"], config["num_samples"], config["replacement"], generator
        ),
        "distributed": lambda: DistributedSampler(data, 3, 1, seed=config["own_seed"], drop_last=True),
    }
    return DataLoader(data, shuffle=kind == "shuffle", sampler=samplers[kind](), **options)


TORCH_ORDERS = [
    {"kind": "sequential", "n": 5},
    {"kind": "shuffle", "n": 101},
    {"kind": "shuffle", "n": 103, "drop_last": True},
    {"kind": "shuffle", "n": 1},
    {"kind": "shuffle", "n": 2000, "batch": 256},
    {"kind": "random", "n": 12, "num_samples": 40},
    {"kind": "random", "n": 12, "num_samples": 24},
    {"kind": "random", "n": 12, "num_samples": 5},
    {"kind": "random", "n": 12, "num_samples": 77, "replacement": True},
    {"kind": "random", "n": 12, "num_samples": 64, "replacement": True},
    {"kind": "subset", "n": 100, "indices": [9, 4, 4, 0, 77, 31, 8]},
    {"kind": "weighted", "n": 6, "weights": [0.1, 0.0, 3.0, 1.0, 0.4, 5.5], "num_samples": 50, "replacement": True},
    {"kind": "weighted", "n": 6, "weights": [0.1, 0.0, 3.0, 1.0, 0.4, 5.5], "num_samples": 1, "replacement": True},
    {"kind": "weighted", "n": 6, "weights": [0.1, 0.2, 3.0, 1.0, 0.4, 5.5], "num_samples": 4},
    {"kind": "distributed", "n": 50, "own_seed": 3},
]


@case
def sampler_torch_order(t):
    """PyTorch's own orders over three epochs, with numbers drawn in between; its splits; its generator."""
    defaults = {"batch": 8, "drop_last": False, "replacement": False, "num_samples": None, "indices": [],
                "weights": [], "own_seed": 0}
    configs = [{**defaults, **config, "seed": seed} for config in TORCH_ORDERS for seed in (None, 0, 2**40 + 5)]
    t.tell("configs", configs)
    for number, config in enumerate(configs):
        torch.manual_seed(number)
        generator = None if config["seed"] is None else torch.Generator().manual_seed(config["seed"])
        loader = torch_loader(config, generator)
        for epoch in range(3):
            if config["kind"] == "distributed":
                loader.sampler.set_epoch(epoch)
            batches, drawn = [], []
            for batch in loader:
                batches.append(batch)
                drawn.append(torch.rand(3))
            t.expect(f"{number}.{epoch}", torch.cat(batches))
            t.expect(f"{number}.{epoch}.sizes", torch.tensor([len(batch) for batch in batches]))
            t.expect(f"{number}.{epoch}.drawn", torch.cat(drawn))
        t.expect(f"{number}.normal", torch.randn(3))

    generator = torch.Generator().manual_seed(7)
    sampler = RandomSampler(range(20), generator=generator)
    t.expect("sampler", torch.tensor([list(sampler) for _ in range(3)]))
    torch.manual_seed(5)
    sampler = RandomSampler(range(20))
    t.expect("sampler.default", torch.tensor([list(sampler) for _ in range(3)]))

    splits = [[3, 7, 0], [0.5, 0.3, 0.2], [0.33, 0.33, 0.34], [1.0]]
    t.tell("splits", splits)
    for number, lengths in enumerate(splits):
        torch.manual_seed(number)
        for name, options in (("own", {"generator": torch.Generator().manual_seed(42)}), ("default", {})):
            parts = random_split(range(10), lengths, **options)
            t.expect(f"split.{number}.{name}", torch.tensor([index for part in parts for index in part]))
            t.expect(f"split.{number}.{name}.lens", torch.tensor([len(part) for part in parts]))
        t.expect(f"split.{number}.drawn", torch.rand(2))

    generator = torch.Generator().manual_seed(9)
    draws = [torch.empty((), dtype=torch.int64).random_(generator=generator) for _ in range(400)]
    t.expect("random", torch.stack(draws))
    for high in (1, 10, 2**28 - 1, 2**28, 2**40):
        t.expect(f"randint.{high}", torch.randint(high, (50,), generator=generator))


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
