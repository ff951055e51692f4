"""Times paged attention: our backends, FlashInfer's own calls and other libraries, case by case.

Not part of the installed package. `python -m benchmarks --help` says what it can do.
"""
