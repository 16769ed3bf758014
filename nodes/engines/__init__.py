"""How a model call is computed: the native path, the managed path, and the dtypes on both."""
