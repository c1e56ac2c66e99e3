"""The native kernel: C++ on the CPU, over the caller's memory (csrc/)."""
