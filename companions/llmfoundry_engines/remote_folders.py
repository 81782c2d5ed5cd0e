"""Listing of folders in a bucket: for remotes whose index files lie in folders below, and for `data ls`."""

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.data.index_files import FolderContent, ListFolder, list_local_folder


def list_remote_folder(url: str) -> ListFolder:
    """Return a function that lists a folder below a URL or a path of this machine. It raises OSError.

    Raises CheckpointError for a URL that cannot be opened.
    """
    return list_folders_of(open_folder(url))


def list_folders_of(root: Folder) -> ListFolder:
    """Return a function that lists a folder at or below `root`. It raises OSError."""
    if not isinstance(root, RemoteFolder):
        assert root.path_here is not None
        return list_local_folder(root.path_here)

    def list_folder(path: str) -> FolderContent:
        files: dict[str, int] = {}
        folders: list[str] = []
        folder = root.child(path) if path else root
        for entry in folder.entries():
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            is_folder_itself = name == "" or str(entry["name"]).strip("/") == folder.path.strip("/")
            if is_folder_itself:  # some consoles create an empty object of the folder's name
                continue
            if entry["type"] == "directory":
                folders.append(name)
            else:
                files[name] = int(entry["size"] or 0)
        return FolderContent(files=files, folders=sorted(folders))

    return list_folder
