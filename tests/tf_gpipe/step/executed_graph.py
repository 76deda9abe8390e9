"""The graph that TensorFlow runs, after its optimisations."""

from tensorflow.python.eager import context


def executed_graph(function, *args):
    """Calls a compiled function for the first time.

    Args:
        function: Function that runs one large graph.
        *args: Its arguments.

    Returns:
        List of `NodeDef` of all devices, with their sends and receives.
    """
    # Run metadata, the other switch, cannot be turned off again: graphs would
    # be gathered to the end of the process.
    context.context().enable_graph_collection()
    try:
        # Drops the graphs that TensorBoard's tracing has left.
        context.context().export_run_metadata()
        function(*args)
        found = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    functions = [
        [node for graph in function.partition_graphs for node in graph.node]
        for function in found.function_graphs
    ]
    # The other graphs are those of single operations.
    return max(functions, key=len)
