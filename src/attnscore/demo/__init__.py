"""The demo: a tour of scores and masks on small inputs, then a real pretrained transformer on real text.

`tour` needs NumPy alone, `minilm` (with `heads`) PyTorch and transformers; `report` gathers what both find
into a folder, `pictures` draws what `attnscore.plotting` does not.
"""
