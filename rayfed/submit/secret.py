"""Which files look like secrets: by their names, and by what they begin with; in upper or lower case.

Source code may have any name, and code and prose may speak of passwords: code stays only where it holds a whole key,
prose also where it holds a token.
"""

import re
from pathlib import Path

from rayfed.base.errors import InputError

HEAD = 2**15  # bytes of a file that are looked at
CODE = r"\.(py|pyi|pyx|ipynb|c|cc|cpp|cu|cuh|h|hpp|java|jl|js|m|r|rs|ts|go|cmake)$"
PROSE = r"\.(md|rst|tex|bib)$"
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # accessKeys
NAME = re.compile(
    r"\.(pem|key|der|p8|p12|pfx|pkcs\d+|ppk|pvk|snk|kdbx?|psafe3|jks|jceks|bks|keystore|keytab|gpg|pgp|age|jwk|ovpn|env"
    r"|tfstate|tfvars|sqlite\d?|db|rdp|publishsettings)(?![a-z0-9])"
    r"|(?<![a-z])((app|client|api)?secrets?|credentials?|creds?|(ht)?pass(words?|wd|phrases?)|netrc|pgpass|npmrc|pypirc"
    r"|s3cfg|dockercfg|kube[-_.]?config|key(store|ring|chain)|wallet|vault|cookies|token_cache|service[-_. ]?accounts?"
    r"|(api|access|private|ssh|ssl|tls|deploy|signing|encryption|master|root|account|service)[-_. ]?keys?"
    r"|(auth|access|api|bearer)[-_. ]?token|id_([rd]sa|ecdsa|ed25519)|rclone\.conf|my\.cnf|kaggle\.json)(?![a-z])"
    r"|passwords?(?![a-z])|(^|/)\.?ssh/"
    r"|(^|/)(id_[^./]*|identity|pw(\.txt)?|\.?envrc|tokens?(\.[^/]*)?|env([._-](local|prod|production|dev|development|staging|test))?)$"
    r"|[-_](rsa|ed25519)$|(?<![a-z])(keys?|token|o?auth2?)(\.(?!csv|tsv|npy|npz)[^/]*)?[~\d]*$"
)
# Of what is found here, only a keyword is shown: the secret itself is in what lies ahead of it.
BLOCK = rb"(?is)BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY|PuTTY-User-Key-File"
BINARY = re.compile(rb"(?s)0(\x82..|\x81.|[\x20-\x7f])\x02\x01[\x00\x01\x03]")  # DER: PKCS#1, SEC 1, PKCS#8, PKCS#12
KEY = re.compile(BLOCK.replace(b"|", rb"(?=.{0,300}?[A-Z0-9+/]{40})|") + rb"(?=-\d:.{0,900}\n)")
# What follows a keyword is its value: no variable, no path, no word of a setting.
IS = rb"[\"']?[ \t]*[=:][ \t]*[\"']?(?!(?i:true|false|none|null|yes|no)\b)[^\s\"'$<{~/.]"
LONG, SHORT = rb"(?=" + IS + rb"[^\s\"']{15})", rb"(?=" + IS + rb"[^\s\"']{3})"
TOKEN = re.compile(
    rb"A[KS]IA(?=[0-9A-Z]{16})|gh[pousr]_(?=[A-Za-z0-9]{36})|github_pat_(?=\w{22})|glpat-(?=[\w-]{20})"
    rb"|xox[abprs]-(?=\w{8})|hf_(?=[A-Za-z0-9]{34})|sk-(?=[\w-]{32})|AIza(?=[\w-]{35})"
    rb"|(?i:key)(?=[\\\"']*[ \t]*[=:][ \t]*[\\\"']*[0-9a-f]{32,64}(?![0-9a-z]))"
    rb"|sk_live_(?=\w{16})|npm_(?=[A-Za-z0-9]{36})|pypi-AgEI(?=[\w-]{16})|dop_v1_(?=[0-9a-f]{32})"
    rb"|hooks\.slack\.com/services/(?=\w)|AGE-SECRET-KEY-1(?=\w)|LS0tLS1CRUdJTi(?=\w{16})"  # "-----BEGIN " in base64
    rb"|(?<!\d)\d{8,10}:(?=AA[\w-]{33})|Bearer[ \t]+(?=[\w.~+/-]{20})|eyJ(?=[\w-]{10,}\.eyJ[\w-]{10,}\.)"
    rb"|(?i:(secret_?(access_?)?|api_?)key|password|passwd|auth_?token)"
    rb"(?=[\\\"'\]]{0,4}[ \t]*=[ \t]*\\?[\"'](?![$<{])[^\s\"'\\]{8})"
)
ADDRESS = re.compile(rb"(?i:[a-z][a-z0-9+.-]{0,20}://)(?=[^\s\"'/@:$<{]*:[^\s\"'/@$<{]+@)")
WORD = re.compile(
    BLOCK + rb"|OpenVPN Static key|client-key-data|machine(?=\s+\S+\s+login\s)|aws_secret_access_key|aws_session_token"
    rb"|\"private_key(_id)?\"|\"auths\"(?=\s*:)|\$ANSIBLE_VAULT|<RSAKeyValue>|SharedAccess(Key|Signature)"
    rb"|\"username\"(?=\s*:[^{}]{1,200}\"key\"\s*:)|\"kty\"(?=\s*:[^{}]{0,2000}\"d\"\s*:)"
    rb"|(?<![a-z])pass(wd|word)?(?=>[^<\s]{4}|\s*=>\s*[\"'][^\"'\s]{4}|[\"']?:[ \t]*\n[ \t]+[^\s-]{4})"
    rb"|(secret_?(access_?)?key|private_?key|client[-_]?secret|(refresh|auth|access)_?token|(api|account)_?key"
    rb"|pass(wd|word|phrase)|(?<![a-z])(pass|pwd|psk))" + SHORT + rb"|(?<![a-z])token" + LONG
)


def secret_in(root: Path, name: str) -> str:
    """Why a file below `root` looks like a secret; '' where it does not."""
    low = HUMP.sub("_", name).lower()
    is_code = re.search(CODE, low) is not None
    is_prose = re.search(PROSE, low) is not None
    name_of_secret = None if is_code else NAME.search(low)
    if name_of_secret:
        return f"named '{name_of_secret[0].strip('/')}'"
    try:
        with (root / name).open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise InputError(f"'{name}' cannot be read ({error.strerror}); leave it out: --exclude '{name}'") from None
    if BINARY.match(head):
        return "holds a key in binary form (DER)"
    head = head.replace(b"\0", b"")  # of UTF-16
    patterns = [KEY]
    if not is_code:
        patterns.append(TOKEN)
    if not (is_code or is_prose):
        patterns += [ADDRESS, WORD]
    for pattern in patterns:
        keyword = pattern.search(head)
        if keyword:
            return f"holds '{keyword[0].decode(errors='replace')}'"
    return ""
