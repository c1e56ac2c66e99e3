"""``attnscore demo``: scores and masks on small inputs, then a pretrained transformer on real text."""
