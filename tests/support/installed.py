"""A package with policies, installed as far as the import system can see."""


def install_policies(folder, monkeypatch, entries):
    """Put `house_policies` on the path, with these entry points: name to what it has."""
    (folder / "house_policies.py").write_text(
        "from hydra_tune.schedule import Fifo\nclass House(Fifo): pass\nNOTHING = 3\n"
    )
    about = folder / "house_policies-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: house-policies\nVersion: 1.0\n")
    lines = [f"{name} = house_policies:{value}" for name, value in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(["[hydra_tune.policies]", *lines, ""]))
    monkeypatch.syspath_prepend(folder)
