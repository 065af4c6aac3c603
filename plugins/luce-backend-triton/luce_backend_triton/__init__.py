"""NVIDIA GPUs for luce-core: quantized weights at the speed of the memory bus."""
