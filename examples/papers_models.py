"""The times that TernGrad's and INCEPTIONN's models give, whose exchanges only `predict` knows."""

from gradwire_lab.plan.cluster import HEADER_BYTES, PAYLOAD_BYTES, Cluster
from gradwire_lab.plan.predict import LayerBucket, predict
from gradwire_lab.plan.profile import CodecSpeed, Layer, Profile

ALEXNET, VGG_A = 61_000_000, 133_000_000  # values
HEADERS = 1 + HEADER_BYTES / PAYLOAD_BYTES  # which the papers do not count


def step_seconds(
    values: int, compute: float, cluster: Cluster, exchange: str, bits: float, gamma: float = 0.0
) -> float:
    """All gradients are exchanged when the backward pass has ended; a sum takes gamma a value."""
    layers = (Layer("all", (values // 1000, 1000), compute),)
    codecs = {"the codec": CodecSpeed(encode_seconds=0.0, decode_seconds=gamma, bits=bits)}
    profile = Profile("a paper's model", 1, 0.0, 0.0, layers, codecs)
    return predict(profile, cluster, "the codec", exchange, [LayerBucket(layers, compute)]).seconds


print("TernGrad, 4 GPUs in a machine: the compute time behind each speed-up that it prints")
for model, values, machines, link, speed_up in (
    ("AlexNet", ALEXNET, 2, 125e6, 3.04),
    ("VggNet-A", VGG_A, 128, 12.5e9, 2.0),
):
    cluster = Cluster(4 * machines, 8 * HEADERS * link, 5e-5, 4, 8 * 10e9)
    floats, trits = (step_seconds(values, 0.0, cluster, "tree", bits) for bits in (32, 2))
    compute = (floats - speed_up * trits) / (speed_up - 1)
    print(
        f"{model:8}  {4 * machines:3} GPUs  {speed_up:4.2f} times: computes {compute:.3f} s, "
        f"exchanges {floats:.3f} s (raw) or {trits:.3f} s (2 bits)"
    )

print("INCEPTIONN, AlexNet, 10 Gbit/s: ms of an exchange, and of that with 4 workers")
for exchange in ("worker-aggregator", "gradient-ring"):
    seconds = [
        step_seconds(ALEXNET, 0.0, Cluster(workers, HEADERS * 10e9, 1e-4), exchange, 32, 4e-10)
        for workers in (4, 6, 8)
    ]
    cells = [
        f"{workers} workers {one * 1e3:4.0f} ({one / seconds[0]:.2f})"
        for workers, one in zip((4, 6, 8), seconds, strict=True)
    ]
    print(f"{exchange:17}  {'  '.join(cells)}")
