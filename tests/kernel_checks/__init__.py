"""What the tests of kernels share, interpreted here and on a GPU alike: tensors, and bounds of what is right."""
