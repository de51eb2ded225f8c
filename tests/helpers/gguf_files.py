"""Files that the gguf package writes."""


def written(writer, path):
    """Write what was added to a GGUFWriter of `path`; the path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
