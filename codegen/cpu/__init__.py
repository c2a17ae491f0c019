"""Linear layers with few rows on CPUs: packed weights of fp32, fp16, int8 and int4, by C++ that is compiled once."""
