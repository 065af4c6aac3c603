"""Who may reach the server: what the options let in, and what they say no to before anything is loaded."""

import socket

import pytest
import trustme

from luce_core.cli.exposure import api_keys, check_exposure, host_names, server_settings, tls_files
from luce_core.core_options import CoreOptions
from luce_core.errors import UsageError
from luce_core.server.headers import AllowedHosts

BEYOND = ["0.0.0.0", "::", "192.168.1.2", "example.org"]
HERE = ["127.0.0.1", "localhost", "::1", "127.1.2.3"]


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """A folder with cert.pem, key.pem and clients.pem."""
    folder = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    made.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "clients.pem")
    return folder


# --- guards


@pytest.mark.parametrize("host", BEYOND)
def test_other_machines_need_a_key_or_a_certificate(host, pem):
    tls = {"tls_cert": pem / "cert.pem", "tls_key": pem / "key.pem"}
    with pytest.raises(UsageError, match=r"lets other machines in.*--api-key.*--tls-client-ca.*--insecure"):
        check_exposure(CoreOptions(host=host))
    with pytest.raises(UsageError, match="TLS alone keeps nobody out"):
        check_exposure(CoreOptions(host=host, **tls))
    check_exposure(CoreOptions(host=host, api_key=("k",)))
    check_exposure(CoreOptions(host=host, **tls, tls_client_ca=pem / "clients.pem"))


@pytest.mark.parametrize("host", HERE)
def test_this_machine_needs_none(host, capsys):
    check_exposure(CoreOptions(host=host))
    check_exposure(CoreOptions(host=host, insecure=True))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("host", BEYOND)
def test_who_insists_is_warned_in_plain_words_unless_something_guards(host, capsys, pem):
    check_exposure(CoreOptions(host=host, insecure=True))
    said = capsys.readouterr().err
    assert said.startswith("Warning: everyone who reaches " + host)
    assert "no key" in said
    check_exposure(CoreOptions(host=host, insecure=True, api_key=("k",)))
    tls = {"tls_cert": pem / "cert.pem", "tls_key": pem / "key.pem", "tls_client_ca": pem / "clients.pem"}
    check_exposure(CoreOptions(host=host, insecure=True, **tls))
    assert not capsys.readouterr().err


# --- keys


def test_keys_come_from_the_options_and_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# the team\none\n\n  two  \n", encoding="utf-8")
    core = CoreOptions(host="0.0.0.0", api_key=("zero",), api_key_file=file)
    assert api_keys(core) == ("zero", "one", "two")
    check_exposure(core.model_copy(update={"api_key": ()}))
    settings = server_settings(core)
    assert (settings.api_keys, settings.api_key_file) == (("zero",), file)


@pytest.mark.parametrize("content", [None, b"", b"# nobody\n\n", b"\xff\xfe"])
def test_a_key_file_without_a_readable_key_is_refused_even_on_this_machine(tmp_path, content):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match="Key file"):
        check_exposure(CoreOptions(api_key_file=file))


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_guards_nothing_and_is_refused(key):
    """What an unset variable in somebody's compose file becomes."""
    with pytest.raises(UsageError, match="API key is empty"):
        check_exposure(CoreOptions(host="0.0.0.0", api_key=("good", key)))


# --- TLS


@pytest.mark.parametrize("flag", ["tls_key", "tls_key_password_file", "tls_client_ca"])
def test_a_file_without_the_certificate_is_refused(flag, pem):
    with pytest.raises(UsageError, match=rf"--{flag.replace('_', '-')} is set and --tls-cert is not"):
        check_exposure(CoreOptions(**{flag: pem / "key.pem"}))


def test_files_that_cannot_be_used_are_refused_before_anything_is_loaded(pem):
    with pytest.raises(UsageError, match="holds no certificate"):
        check_exposure(CoreOptions(tls_cert=pem / "key.pem"))
    files = tls_files(CoreOptions(tls_cert=pem / "cert.pem", tls_key=pem / "key.pem"))
    assert (files.cert, files.key, files.password_file, files.client_ca) == (
        pem / "cert.pem", pem / "key.pem", None, None,
    )  # fmt: skip
    assert server_settings(CoreOptions(tls_cert=pem / "cert.pem")).tls
    assert tls_files(CoreOptions()) is None
    assert not server_settings(CoreOptions()).tls


# --- names


def test_the_server_answers_to_names_it_was_given():
    assert socket.gethostname() not in host_names(CoreOptions())
    outside = AllowedHosts(None, host_names(CoreOptions(host="box.example", allowed_host=("other.example",))))
    for name in ("box.example", "other.example", socket.gethostname(), "localhost", "10.1.2.3"):
        assert outside.allows(f"{name}:8080")
    assert not outside.allows("evil.example")
    assert not AllowedHosts(None, host_names(CoreOptions(host="0.0.0.0"))).allows("evil.example")
