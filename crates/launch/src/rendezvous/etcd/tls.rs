//! TLS to etcd, and what its failures mean.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, Error, RootCertStore, StreamOwned};

use super::Trouble;
use super::http::Timed;
use crate::etcd_access::Tls;
use crate::host_name::without_brackets;

/// Whether the files can be used, so that a launch is refused before it starts anything.
pub fn check(tls: &Tls) -> Result<(), String> {
    config(tls).map(|_| ())
}

/// Reads the files, at each connection: certificates are replaced while runs go on.
fn config(tls: &Tls) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&tls.authority)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", tls.authority.display()))?;
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
    let builder = builder.with_root_certificates(roots);
    let Some((certificate, key)) = &tls.own else { return Ok(builder.with_no_client_auth()) };
    let private = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| format!("{} has no private key in PEM: {error}", key.display()))?;
    let own = builder.with_client_auth_cert(certificates(certificate)?, private);
    own.map_err(|error| format!("{} and {} do not fit together: {error}", certificate.display(), key.display()))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{} has no certificate in PEM: {error}", path.display());
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if found.is_empty() => Err(failed(&"there is no such section")),
        Ok(found) => Ok(found),
        Err(error) => Err(failed(&error)),
    }
}

pub fn secured(stream: Timed, tls: &Tls, host: &str) -> Result<impl Read + Write, Trouble> {
    // Files that were there at the start may be about to be replaced.
    let config = config(tls)?;
    let name = ServerName::try_from(without_brackets(host).to_owned());
    let name = name.map_err(|_| Trouble::Lasting(format!("{host} is no name that a certificate can have")))?;
    let connection = ClientConnection::new(Arc::new(config), name).map_err(|error| error.to_string())?;
    Ok(StreamOwned::new(connection, stream))
}

/// What a failure of TLS means; the error itself if it is another one.
pub fn of_handshake(error: io::Error, tls: &Tls, host: &str) -> Result<Trouble, io::Error> {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        // As an etcd without TLS does, and one that is about to end.
        return Ok(Trouble::Passing("it has closed the connection; does it speak TLS (protocol=https)?".to_owned()));
    }
    let Some(failure) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else { return Err(error) };
    Ok(match failure {
        Error::InvalidCertificate(why) => Trouble::Lasting(of_certificate(why, tls, host)),
        Error::AlertReceived(alert) if is_of_certificates(*alert) => Trouble::Lasting(match &tls.own {
            None => format!("it wants a certificate of this host ({alert:?}): give cert and key in --rdzv-conf"),
            Some((own, _)) => format!("it does not accept the certificate in {} ({alert:?})", own.display()),
        }),
        Error::InvalidMessage(_) => {
            Trouble::Lasting("it does not speak TLS: leave out protocol=https in --rdzv-conf".to_owned())
        }
        other => Trouble::Passing(format!("TLS: {other}")),
    })
}

fn of_certificate(why: &CertificateError, tls: &Tls, host: &str) -> String {
    match why {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("its certificate has expired: {why}")
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            format!("its certificate is not signed by an authority in {} (cacert)", tls.authority.display())
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            format!("its certificate is not for {host}: {why}")
        }
        _ => format!("its certificate cannot be trusted: {why}"),
    }
}

/// Of this host's own certificate, which etcd has looked at or misses.
fn is_of_certificates(alert: AlertDescription) -> bool {
    use AlertDescription::{
        AccessDenied, BadCertificate, CertificateExpired, CertificateRequired, CertificateRevoked, CertificateUnknown,
        NoCertificate, UnknownCA, UnsupportedCertificate,
    };
    matches!(
        alert,
        AccessDenied
            | BadCertificate
            | CertificateExpired
            | CertificateRequired
            | CertificateRevoked
            | CertificateUnknown
            | NoCertificate
            | UnknownCA
            | UnsupportedCertificate
    )
}
