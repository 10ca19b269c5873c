"""The cases of each codec, in a module of the same name as its twin in spec/payloads/.

A module has any of these; make_golden.py adds a few cases that every codec has.

- ENCODE: codec string, tensor of golden_cases.inputs, number of values
- FEEDBACK: name, codec string, values, residual before
- DECODE: valid frames by name, also frames that no encoder writes
- ERRORS: for each status the frames that are refused with it, by name
"""
