"""Pictures of attention: heat maps, and long contexts. Each function returns a matplotlib figure."""

from attnscore.plotting.heatmaps import show_attention, show_head_grid, show_heatmaps
from attnscore.plotting.long_contexts import show_key_mass, show_long_attention, show_pooled_weights, show_top_weights

__all__ = [
    "show_attention",
    "show_head_grid",
    "show_heatmaps",
    "show_key_mass",
    "show_long_attention",
    "show_pooled_weights",
    "show_top_weights",
]
