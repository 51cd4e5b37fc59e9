"""The matmul of a mixture of experts: consecutive groups of rows, each times a matrix of its own."""
