"""TLS with real clients: certificates and keys that fit and that do not, client certificates, renewal."""

import logging
import socket
import ssl
import subprocess
from datetime import UTC, datetime, timedelta

import httpx
import openai
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from luce_core.errors import UsageError
from luce_core.server.settings import ServerSettings
from luce_core.server.tls import TlsFiles, load_context, server_context, validity

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def strangers():
    """Another authority."""
    return trustme.CA()


def write(folder, authority, **more):
    """Certificate and key in files of their own."""
    made = authority.issue_cert("localhost", "127.0.0.1", **more)
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    (folder / "key.pem").write_bytes(made.private_key_pem.bytes())
    return TlsFiles(folder / "cert.pem", folder / "key.pem")


def client_context(authority, certificate=None):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context


@pytest.fixture
def serve_tls(serve):
    def start(files):
        return serve(settings=ServerSettings(tls=True), front={"tls": files})

    return start


# --- real clients


def test_the_official_client_and_httpx_talk_to_it(serve_tls, authority, tmp_path):
    context = client_context(authority)
    with serve_tls(write(tmp_path, authority)) as served, httpx.Client(verify=context, timeout=60) as client:
        assert served.url.startswith("https://127.0.0.1:")
        assert client.get(f"{served.url}/health").json()["status"] == "ok"
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", http_client=client) as official:
            whole = official.chat.completions.create(
                model="m", messages=MESSAGES, max_tokens=8, temperature=0
            )
            chunks = official.chat.completions.create(
                model="m", messages=MESSAGES, max_tokens=8, temperature=0, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_a_client_that_does_not_know_the_authority_does_not_talk_to_it(serve_tls, authority, tmp_path):
    with (
        serve_tls(write(tmp_path, authority)) as served,
        pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        httpx.get(f"{served.url}/health", timeout=60)


def test_plain_http_gets_no_answer_and_breaks_nothing(serve_tls, authority, tmp_path):
    with serve_tls(write(tmp_path, authority)) as served:
        with pytest.raises(httpx.TransportError):
            httpx.get(served.url.replace("https", "http") + "/health", timeout=60)
        assert httpx.get(f"{served.url}/health", verify=client_context(authority), timeout=60).is_success


@pytest.mark.parametrize(
    ("version", "spoken"), [(ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")]
)
def test_tls_1_2_and_1_3_are_spoken(authority, tmp_path, version, spoken):
    client = client_context(authority)
    client.minimum_version = client.maximum_version = version
    assert shake(server_context(write(tmp_path, authority)), client).version() == spoken


def test_what_is_older_is_not(authority, tmp_path):
    client = client_context(authority)
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match=r"UNSUPPORTED_PROTOCOL|NO_PROTOCOLS_AVAILABLE|PROTOCOL_VERSION"):
        shake(server_context(write(tmp_path, authority)), client)


def shake(server, client, name="localhost"):
    """A handshake without sockets; the client's side of it. Raises what either side raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=name)
    waiting = [theirs, ours]
    for _ in range(20):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    assert not waiting
    return theirs


# --- client certificates


@pytest.fixture
def mutual(serve_tls, authority, strangers, tmp_path):
    """A server with a certificate of `authority` that lets in whom `strangers` vouch for."""
    strangers.cert_pem.write_to_path(tmp_path / "clients.pem")
    files = write(tmp_path, authority)
    with serve_tls(TlsFiles(files.cert, files.key, client_ca=tmp_path / "clients.pem")) as served:
        yield served


def test_only_clients_with_a_certificate_of_the_authority_come_in(mutual, authority, strangers):
    def get(certificate):
        with httpx.Client(verify=client_context(authority, certificate), timeout=60) as client:
            return client.get(f"{mutual.url}/v1/models")

    assert get(strangers.issue_cert("agent@example.org")).status_code == 200
    for wrong in (None, authority.issue_cert("agent@example.org"), trustme.CA().issue_cert("a@example.org")):
        with pytest.raises(httpx.TransportError):
            get(wrong)
    assert get(strangers.issue_cert("other@example.org")).status_code == 200


# --- files that are wrong


def problem(files):
    with pytest.raises(UsageError) as caught:
        load_context(files)
    return str(caught.value)


@pytest.mark.parametrize("which", ["cert", "key", "password_file", "client_ca"])
def test_a_file_that_is_not_there_is_named(authority, tmp_path, which):
    files = {"cert": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    write(tmp_path, authority)
    encrypt(tmp_path / "key.pem", b"x")
    (tmp_path / "pass").write_text("x\n")
    files["password_file"] = tmp_path / "pass"
    files[which] = tmp_path / "absent.pem"
    said = problem(TlsFiles(**files))
    assert "absent.pem" in said
    assert "No such file" in said
    assert f"--tls-{which.replace('_', '-').replace('password', 'key-password')}" in said


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x30\x82\xff\xfe", b"-----BEGIN PUBLIC KEY-----\n"])
@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
def test_a_file_of_something_else_is_named(authority, strangers, tmp_path, content, which):
    files = write(tmp_path, authority)
    strangers.cert_pem.write_to_path(tmp_path / "client_ca.pem")
    (tmp_path / f"{which}.pem").write_bytes(content)
    said = problem(TlsFiles(files.cert, files.key, client_ca=tmp_path / "client_ca.pem"))
    assert f"{which}.pem" in said
    assert "PEM" in said


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
def test_pem_with_nonsense_inside_is_named(authority, strangers, tmp_path, which):
    files = write(tmp_path, authority)
    strangers.cert_pem.write_to_path(tmp_path / "client_ca.pem")
    path = tmp_path / f"{which}.pem"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "AAAA" * 10, lines[-1]]) + "\n")
    assert f"{which}.pem" in problem(TlsFiles(files.cert, files.key, client_ca=tmp_path / "client_ca.pem"))


def test_a_key_of_another_certificate_is_named(authority, tmp_path):
    files = write(tmp_path, authority)
    other = authority.issue_cert("localhost")
    files.key.write_bytes(other.private_key_pem.bytes())
    said = problem(files)
    assert "key.pem" in said
    assert "cert.pem" in said
    assert "is not the key" in said


def test_certificate_and_key_may_be_in_one_file_or_the_key_is_asked_for(authority, tmp_path):
    files = write(tmp_path, authority)
    both = tmp_path / "both.pem"
    both.write_bytes(files.key.read_bytes() + files.cert.read_bytes())
    load_context(TlsFiles(both))
    assert "--tls-key" in problem(TlsFiles(files.cert))


def encrypt(path, password, form=serialization.PrivateFormat.PKCS8):
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(password))
    )


@pytest.mark.parametrize(
    "form", [serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL]
)
def test_an_encrypted_key_needs_its_password(authority, tmp_path, form):
    files = write(tmp_path, authority)
    encrypt(files.key, "sésame ".encode(), form)
    said = problem(files)
    assert "encrypted" in said
    assert "--tls-key-password-file" in said
    password = tmp_path / "password"
    for wrong in ("hunter2", "sesame"):
        password.write_text(wrong + "\n", encoding="utf-8")
        said = problem(TlsFiles(files.cert, files.key, password))
        assert "--tls-key-password-file" in said
        assert wrong not in said
    password.write_text("", encoding="utf-8")
    assert "is empty" in problem(TlsFiles(files.cert, files.key, password))
    password.write_text("sésame \nsecond line\n", encoding="utf-8")
    load_context(TlsFiles(files.cert, files.key, password))


def test_a_certificate_too_weak_for_tls_is_named(tmp_path):
    # An RSA key of 512 bits, as none should be used since the last century.
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:512", "-nodes", "-subj", "/CN=localhost",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("this openssl makes no such key")
    assert "cert.pem" in problem(TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem"))


# --- dates


@pytest.mark.parametrize(
    ("begins", "ends", "said"),
    [(-20, -10, "expired on"), (10, 20, "not valid before"), (-10, 10, None)],
)
def test_a_certificate_out_of_its_time_is_used_with_a_warning(
    authority, tmp_path, caplog, begins, ends, said
):
    now = datetime.now(UTC)
    files = write(
        tmp_path, authority, not_before=now + timedelta(days=begins), not_after=now + timedelta(days=ends)
    )
    with caplog.at_level(logging.WARNING, "luce_core.server"):
        server_context(files)
    if said is None:
        assert not caplog.records
    else:
        assert said in caplog.text
        assert "cert.pem" in caplog.text


DATES = st.datetimes(datetime(1950, 1, 1), datetime(2400, 1, 1)).map(lambda date: date.replace(microsecond=0))


@given(st.lists(DATES, min_size=2, max_size=2, unique=True).map(sorted))
def test_dates_are_read_as_another_library_reads_them(dates):
    der = certificate(*dates)
    read = x509.load_der_x509_certificate(der)
    assert validity(der) == (read.not_valid_before_utc, read.not_valid_after_utc)


KEY = ec.generate_private_key(ec.SECP256R1())
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x" * 60)])


def certificate(begins, ends):
    made = x509.CertificateBuilder(NAME, NAME, KEY.public_key(), x509.random_serial_number(), begins, ends)
    return made.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


# --- renewal


def serial(url, authority):
    """Of the certificate a server shows to a new connection."""
    where = httpx.URL(url)
    with (
        socket.create_connection((where.host, where.port), timeout=60) as raw,
        client_context(authority).wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True)).serial_number


def serial_in(path):
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_a_renewed_certificate_is_shown_from_the_next_connection_on(serve_tls, authority, tmp_path, caplog):
    files = write(tmp_path, authority)
    first = serial_in(files.cert)
    with (
        serve_tls(files) as served,
        httpx.Client(verify=client_context(authority), base_url=served.url, timeout=60) as held,
    ):
        assert held.get("/health").is_success
        assert serial(served.url, authority) == first
        new = tmp_path / "new"
        new.mkdir()
        renewed = write(new, authority)
        second = serial_in(renewed.cert)
        renewed.cert.replace(files.cert)
        # Half of the pair is new: the old one goes on, and the log says why.
        assert serial(served.url, authority) == first
        assert serial(served.url, authority) == first
        assert caplog.text.count("stays in use") == 1
        renewed.key.replace(files.key)
        assert serial(served.url, authority) == second != first
        assert held.get("/health").is_success  # connections that were open stay open


def test_renewal_needs_no_name_in_the_handshake(authority, tmp_path):
    """A client that connects to an address sends none."""
    files = write(tmp_path, authority)
    context = server_context(files)
    before = x509.load_der_x509_certificate(
        shake(context, client_context(authority), "127.0.0.1").getpeercert(binary_form=True)
    )
    write(tmp_path, authority)
    after = x509.load_der_x509_certificate(
        shake(context, client_context(authority), "127.0.0.1").getpeercert(binary_form=True)
    )
    assert after.serial_number == serial_in(files.cert) != before.serial_number


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_is_let_in_follows_the_file_of_authorities(authority, strangers, tmp_path, version):
    files = write(tmp_path, authority)
    path = tmp_path / "clients.pem"
    strangers.cert_pem.write_to_path(path)
    context = server_context(TlsFiles(files.cert, files.key, client_ca=path))
    old = client_context(authority, strangers.issue_cert("a@example.org"))
    new = client_context(authority, authority.issue_cert("a@example.org"))
    for client in (old, new):
        client.maximum_version = version
    shake(context, old)
    with pytest.raises(ssl.SSLError):
        shake(context, new)
    authority.cert_pem.write_to_path(path)
    shake(context, new)
    with pytest.raises(ssl.SSLError):
        shake(context, old)
