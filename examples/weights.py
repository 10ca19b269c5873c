"""A trainer publishes each step of its model, and a receiver follows."""

import tempfile

import torch

from gradwire.weights import Publisher, Subscriber


def make_model() -> torch.nn.Module:
    layers = (torch.nn.Linear(256, 256) for _ in range(4))
    return torch.nn.Sequential(*layers).bfloat16()


store = tempfile.mkdtemp()  # a folder that both see, or s3://bucket/policy
model, served = make_model(), make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
publisher = Publisher(store, anchor_every=50)
subscriber = Subscriber(store)

for _ in range(5):
    loss = model(torch.randn(32, 256).bfloat16()).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    published = publisher.publish(model)

    subscriber.fetch()  # while the model is in use
    applied = subscriber.apply_(served)  # the pause
    print(
        f"version {applied.version}: {published.share_changed:.1%} of the weights changed, "
        f"{published.bytes} bytes, pause {1000 * applied.seconds:.1f} ms"
    )

for name, values in model.state_dict().items():
    assert torch.equal(values, served.state_dict()[name])
