def clean_stale_shared_memory():
    return []


def wait_for_folders(folders):
    pass
