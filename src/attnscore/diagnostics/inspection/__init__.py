"""Attention of every head of a pretrained model on one text, and its report as one HTML file."""
