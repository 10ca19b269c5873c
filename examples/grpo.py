"""GRPO on a toy task: processes that generate text follow the trainer's weights through a store.

The task is to count on from a digit. The reward is the share of digits that are the one before plus
one. Everything is made on the spot and runs on a CPU.
"""

import tempfile
from multiprocessing.queues import Queue

import torch
from torch import Tensor, nn

from gradwire.weights import Publisher, Subscriber

DIGITS, LENGTH = 10, 9  # a digit as the prompt, and how many follow it
PROMPTS, GROUP = 8, 16  # of a batch; answers to one prompt, which are compared
STEPS, WORKERS = 40, 2
CLIP = 0.2  # how far the policy may move from the one that gave the answers


class Policy(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) / 8)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logarithms of the probabilities of what follows each token."""
        n = tokens.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        hidden = self.layers(self.tokens(tokens) + self.places[:n], mask)
        return self.head(hidden).float().log_softmax(-1)


def taken(policy: Policy, answers: Tensor) -> Tensor:
    """The logarithms of the probabilities of an answer's digits after its prompt."""
    return policy(answers[:, :-1]).gather(2, answers[:, 1:, None])[..., 0]


def reward(answers: Tensor) -> Tensor:
    return ((answers[:, :-1] + 1) % DIGITS == answers[:, 1:]).float().mean(1)


@torch.no_grad()
def generate(worker: int, store: str, batches: "Queue[tuple[int | None, list[list[int]]]]") -> None:
    """A worker: it answers prompts with the newest policy that it has."""
    torch.manual_seed(worker)
    torch.set_num_threads(1)
    policy, subscriber = Policy().bfloat16(), Subscriber(store)
    while True:
        subscriber.fetch()
        subscriber.apply_(policy)
        answers = torch.randint(DIGITS, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
        for _ in range(LENGTH):
            last = policy(answers)[:, -1].exp()
            answers = torch.cat([answers, last.multinomial(1)], 1)
        batches.put((subscriber.version, answers.tolist()))


def train() -> None:
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gradwire.weights"])  # once for all workers
    batches = context.Queue(WORKERS)
    with tempfile.TemporaryDirectory() as store:
        publisher = Publisher(store, dtype="bfloat16", anchor_every=20)
        published = publisher.publish(policy)
        full = published.bytes
        workers = [
            context.Process(target=generate, args=(worker, store, batches), daemon=True)
            for worker in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        for step in range(1, STEPS + 1):
            version, tokens = batches.get(timeout=60)
            answers = torch.tensor(tokens)
            rewards = reward(answers).view(PROMPTS, GROUP)
            spread = rewards.std(1, keepdim=True) + 1e-4
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
            with torch.no_grad():
                old = taken(policy, answers)
            for _ in range(2):
                ratio = (taken(policy, answers) - old).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            behind = published.version - version
            published = publisher.publish(policy)
            if step % 10 == 0:
                print(
                    f"step {step}: reward {rewards.mean():.2f}, answers {behind} versions behind, "
                    f"version {published.version} has {published.bytes} bytes of {full}"
                )
        for worker in workers:  # each waits until its last batch is taken
            worker.terminate()
            worker.join()


if __name__ == "__main__":
    train()
