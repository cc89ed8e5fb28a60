//! etcd itself with TLS, certificates of clients, and users. Certificates are made by `openssl`.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::etcd::{Etcd, Run};
use crate::launcher::{Ended, wait_for};
use crate::port::free_port;

/// Tests of etcd itself.
pub const OF_ETCD: &[crate::Test] = &[
    ("launch::etcd_tls::the_loss_of_node_zero_is_survived_by_tls", the_loss_of_node_zero_is_survived_by_tls),
    ("launch::etcd_tls::certificates_that_do_not_fit_are_named", certificates_that_do_not_fit_are_named),
    ("launch::etcd_tls::a_user_that_etcd_does_not_accept_is_named", a_user_that_etcd_does_not_accept_is_named),
];

#[cfg(feature = "tls")]
crate::tests![options_of_etcd_that_contradict_each_other_are_refused, files_that_cannot_be_used_are_named];
#[cfg(not(feature = "tls"))]
crate::tests![options_of_etcd_that_contradict_each_other_are_refused];

/// Why there are no certificates here.
pub fn missing() -> Option<String> {
    if !cfg!(feature = "tls") {
        return Some("the launcher is built without the feature `tls`".to_owned());
    }
    let has = Command::new("openssl").arg("version").output().is_ok_and(|output| output.status.success());
    (!has).then(|| "no openssl".to_owned())
}

/// An authority, and what it has signed.
struct Authority {
    folder: TempDir,
}

impl Authority {
    fn new() -> Self {
        let authority = Self { folder: TempDir::new().unwrap() };
        fs::write(
            authority.file("config"),
            "[ca]\ndefault_ca=own\n[own]\ndatabase=index\nnew_certs_dir=.\ndefault_md=sha256\npolicy=names\n\
             copy_extensions=copy\nrand_serial=yes\nunique_subject=no\n[names]\ncommonName=supplied\n",
        )
        .unwrap();
        fs::write(authority.file("index"), "").unwrap();
        let whole = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=authority";
        authority.openssl(&format!("{whole} -keyout authority.key -out authority.pem"));
        authority
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn openssl(&self, arguments: &str) {
        let output = Command::new("openssl").args(arguments.split(' ')).current_dir(&self.folder).output().unwrap();
        assert!(output.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Makes `<name>.pem` and `<name>.key`, valid until the end of this year.
    fn sign(&self, name: &str, address: &str, until: u32) {
        let key = "req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        self.openssl(&format!(
            "{key} -subj /CN={name} -addext subjectAltName=IP:{address} -keyout {name}.key -out {name}.csr"
        ));
        let dates = format!("-startdate 20200101000000Z -enddate {until}1231235959Z");
        self.openssl(&format!(
            "ca -batch -notext -config config -cert authority.pem -keyfile authority.key -in {name}.csr -out {name}.pem {dates}"
        ));
    }

    fn path(&self, name: &str) -> String {
        self.file(name).display().to_string()
    }
}

/// Longer than any test, and shorter than what 32 bits of seconds can say.
const LATER: u32 = 2037;

/// An etcd that serves by TLS with `server.pem`, and asks clients for a certificate of the same authority.
fn etcd_with(authority: &Authority, server: &str, asks: bool) -> Etcd {
    let path = |name: &str| authority.path(name);
    let mut options = vec![
        format!("--cert-file={}", path(&format!("{server}.pem"))),
        format!("--key-file={}", path(&format!("{server}.key"))),
    ];
    if asks {
        options.extend(["--client-cert-auth".to_owned(), format!("--trusted-ca-file={}", path("authority.pem"))]);
    }
    Etcd::start("https", &options)
}

/// What a launcher says that has ten minutes to meet the others.
fn ended(etcd: &Etcd, conf: &str) -> Ended {
    let conf = format!("--rdzv-conf=join_timeout=600,last_call_timeout=0,lease_timeout=8,{conf}");
    Run::with_lease(8, etcd.port, "1:2", &[&conf]).start(0).end()
}

fn the_loss_of_node_zero_is_survived_by_tls() {
    let authority = Authority::new();
    authority.sign("server", "127.0.0.1", LATER);
    authority.sign("client", "127.0.0.1", LATER);
    let etcd = etcd_with(&authority, "server", true);
    let [ca, cert, key] = ["authority.pem", "client.pem", "client.key"].map(|name| authority.path(name));
    // The names of torchrun's `etcd-v2`.
    let conf = format!(
        "--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120,last_call_timeout=600,lease_timeout=8,protocol=https,\
         ca_cert={ca},ssl_cert={cert},ssl_cert_key={key}"
    );
    let run = Run::with_lease(8, etcd.port, "1:2", &[&conf]);
    run.loses_node_zero_and_gets_it_back();
}

fn certificates_that_do_not_fit_are_named() {
    let (authority, other) = (Authority::new(), Authority::new());
    authority.sign("server", "127.0.0.1", LATER);
    authority.sign("old", "127.0.0.1", 2021);
    authority.sign("elsewhere", "10.0.0.1", LATER);
    other.sign("client", "127.0.0.1", LATER);
    let trusting = format!("protocol=https,cacert={}", authority.path("authority.pem"));
    let says = |etcd: &Etcd, conf: &str, what: &str| {
        let ended = ended(etcd, conf);
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
        ended.says(&format!("etcd at 127.0.0.1:{}: {what}", etcd.port));
    };

    let etcd = etcd_with(&authority, "server", true);
    let unknown = other.path("authority.pem");
    let wrong = format!("its certificate is not signed by an authority in {unknown} (cacert)");
    says(&etcd, &format!("protocol=https,cacert={unknown}"), &wrong);
    says(&etcd, &trusting, "it wants a certificate of this host");
    let own = format!("cert={},key={}", other.path("client.pem"), other.path("client.key"));
    let refused = format!("it does not accept the certificate in {}", other.path("client.pem"));
    says(&etcd, &format!("{trusting},{own}"), &refused);
    drop(etcd);
    says(&etcd_with(&authority, "old", false), &trusting, "its certificate has expired: ");
    says(&etcd_with(&authority, "elsewhere", false), &trusting, "its certificate is not for 127.0.0.1: ");
    // An etcd without TLS closes the connection, as one does that is about to end: so this is tried again.
    let etcd = Etcd::start("http", &[]);
    let conf = format!("--rdzv-conf=join_timeout=1,last_call_timeout=0,lease_timeout=8,{trusting}");
    let ended = crate::launcher::undisturbed(|times| {
        let conf = conf.replace("join_timeout=1,", &format!("join_timeout={times},"));
        let ended = Run::with_lease(8, etcd.port, "1:2", &[&conf]).start(0).end();
        // It may not listen yet.
        if ended.err.contains("does it speak TLS") { Ok(ended) } else { Err(ended.err) }
    });
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
}

/// Posts to an etcd without TLS, which may not listen yet.
fn post(port: u16, path: &str, text: &str) {
    let answer = wait_for("etcd's answer", || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        write!(stream, "POST {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{text}", text.len()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        // Before it has elected itself, etcd answers with an error.
        (!answer.contains(" 503 ")).then_some(answer)
    });
    assert!(answer.contains(" 200 OK"), "{path}: {answer}");
}

fn a_user_that_etcd_does_not_accept_is_named() {
    let authority = Authority::new();
    authority.sign("server", "127.0.0.1", LATER);
    let path = |name: &str| authority.path(name);
    let plain = free_port();
    let options = [format!("--cert-file={}", path("server.pem")), format!("--key-file={}", path("server.key"))];
    let etcd = Etcd::start_beside("https", &options, Some(plain));
    for (name, role) in [("root", "root"), ("runs", "runs"), ("guest", "guest")] {
        post(plain, "/v3/auth/user/add", &format!(r#"{{"name":"{name}","password":"secret of {name}"}}"#));
        post(plain, "/v3/auth/role/add", &format!(r#"{{"name":"{role}"}}"#));
        post(plain, "/v3/auth/user/grant", &format!(r#"{{"user":"{name}","role":"{role}"}}"#));
    }
    // `/overdrive-run/` up to `/overdrive-run0`, in base64.
    let keys = r#""key":"L292ZXJkcml2ZS1ydW4v","range_end":"L292ZXJkcml2ZS1ydW4w""#;
    post(plain, "/v3/auth/role/grant", &format!(r#"{{"name":"runs","perm":{{"permType":"READWRITE",{keys}}}}}"#));
    post(plain, "/v3/auth/enable", "{}");

    let trusting = format!("protocol=https,cacert={}", path("authority.pem"));
    let password = |name: &str, text: &str| {
        let file = authority.file(name);
        fs::write(&file, format!("{text}\n")).unwrap();
        private(&file);
        format!("password_file={}", file.display())
    };
    let [right, wrong, of_guest] = [("right", "secret of runs"), ("wrong", "guessed"), ("of-guest", "secret of guest")]
        .map(|(a, b)| password(a, b));
    let says = |conf: &str, what: &str| {
        let ended = ended(&etcd, conf);
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
        ended.says(&format!("etcd at 127.0.0.1:{}: it has answered ", etcd.port));
        ended.says(what);
        assert!(!ended.err.contains("guessed") && !ended.err.contains("secret of"), "{ended:?}");
    };
    says(&trusting, "it needs a user: give user=NAME in --rdzv-conf");
    says(&format!("{trusting},user=runs,{wrong}"), "; the user is runs");
    says(&format!("{trusting},user=guest,{of_guest}"), "permission denied");
    let conf = format!(
        "--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120,last_call_timeout=600,lease_timeout=8,{trusting},\
         user=runs,{right}"
    );
    Run::with_lease(8, etcd.port, "1:2", &[&conf]).loses_node_zero_and_gets_it_back();
}

fn private(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// What a launcher says about options, before it looks for etcd.
fn refusal(conf: &str) -> String {
    let ended = Run::with_lease(8, free_port(), "1:2", &[&format!("--rdzv-conf={conf}")]).start(0).end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{ended:?}");
    ended.err
}

fn options_of_etcd_that_contradict_each_other_are_refused() {
    for (conf, what) in [
        ("protocol=ftp", "give http or https"),
        ("protocol=https", "give cacert=FILE too"),
        ("cacert=a.pem", "give protocol=https too"),
        ("cert=a.pem", "give protocol=https too"),
        ("protocol=https,cacert=a.pem,key=a.key", "give cert=FILE too"),
        ("protocol=https,cacert=", "give a file"),
        ("user=me", "give password_file=FILE too"),
        ("password_file=a", "give user=NAME too"),
    ] {
        let said = refusal(conf);
        assert!(said.contains(what), "{conf}: {said}");
    }
}

#[cfg(feature = "tls")]
fn files_that_cannot_be_used_are_named() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("empty.pem");
    fs::write(&file, "no certificate\n").unwrap();
    let file = file.display();
    let said = refusal(&format!("protocol=https,cacert={file}"));
    assert!(said.contains(&format!("{file} has no certificate in PEM")), "{said}");
    let said = refusal("protocol=https,cacert=/nowhere/ca.pem");
    assert!(said.contains("/nowhere/ca.pem has no certificate in PEM"), "{said}");
    // A password is not sent without TLS.
    let password = folder.path().join("password");
    fs::write(&password, "secret").unwrap();
    private(&password);
    let said = refusal(&format!("user=me,password_file={}", password.display()));
    assert!(said.contains("its password could be read on the way to etcd"), "{said}");
    assert!(!said.contains("secret"), "{said}");
}
