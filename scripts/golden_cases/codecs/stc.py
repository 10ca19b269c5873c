from golden_cases.inputs import MAX, gradient

ENCODE = [
    *(("stc", "gradient", n) for n in (1021, 40961)),
    ("stc:density=0.3,coder=zre", "gradient", 320),
    ("stc:density=0.3,coder=none", "gradient", 39),
    ("stc", "spike", 1021),
]
FEEDBACK = [
    ("stc", "stc:density=0.2", gradient(50, 101), gradient(51, 101)),
    # What is not sent would round to an infinite residual.
    (
        "stc-huge-half",
        "stc:density=0.3,residual=bf16",
        [(-1) ** i * (1 - 1e-4 * i) * MAX for i in range(20)],
        [0.0] * 20,
    ),
]
