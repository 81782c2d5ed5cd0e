"""A reader of mails for `data prepare`."""


def read_mails(file, name):
    """Mails with a separator after each. Their texts come after the first empty line."""
    for mail in file.read().decode().split("\x1e"):
        head, separator, text = mail.partition("\n\n")
        if head.strip() and not separator:
            raise ValueError("no empty line after its head")
        if separator:
            yield text.strip()
