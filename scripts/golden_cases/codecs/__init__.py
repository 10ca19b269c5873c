"""The cases of each codec, in a module with the same name as in spec/payloads/.

A module has any of these lists; make_golden.py adds a few cases for every codec.

- ENCODE: codec string, tensor of golden_cases.inputs, number of values
- FEEDBACK: name, codec string, values, residual before
- DECODE: valid frames by name, including frames that no encoder writes
- ERRORS: for each status, the frames that are refused with it, by name
"""
