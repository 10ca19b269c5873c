from golden_cases.inputs import gradient

ENCODE = [
    *(("stc", "gradient", n) for n in (1021, 40961)),
    ("stc:density=0.3,coder=zre", "gradient", 320),
    ("stc:density=0.3,coder=none", "gradient", 39),
    ("stc", "spike", 1021),
]
FEEDBACK = [("stc", "stc:density=0.2", gradient(50, 101), gradient(51, 101))]
