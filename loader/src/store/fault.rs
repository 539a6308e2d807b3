//! Classifies store errors: whether to retry, and what to do about them.

use std::io::{self, ErrorKind};

use super::observed::Notes;
use super::redact::redact;
use super::retry::Fault;
use super::url::StoreKind;

/// Classifies an error by status, or by kind if no response was seen.
pub(super) fn store_fault(error: &object_store::Error, notes: Notes, store: StoreKind) -> Fault {
    let reason = short_reason(error);
    if let Some(permanent) = permanent_cause(error) {
        return permanent;
    }
    match notes.status {
        Some(412) => replaced(),
        Some(408 | 429 | 500..) => Fault::Transient { reason, retry_after: notes.retry_after },
        Some(404 | 410) => Fault::is_final(ErrorKind::NotFound, reason),
        Some(401 | 403) => {
            let reason = format!("{reason}; {}", store.credentials_hint());
            Fault::is_final(ErrorKind::PermissionDenied, reason)
        }
        Some(416) => Fault::is_final(
            ErrorKind::UnexpectedEof,
            format!("{reason}; the object is shorter than expected"),
        ),
        // The response was successful, but its headers could not be used.
        Some(200..300) => Fault::is_final(ErrorKind::InvalidData, reason),
        Some(_) => Fault::is_final(ErrorKind::Other, reason),
        None if notes.is_sent => Fault::transient(reason),
        None => unsent(error, reason, store),
    }
}

/// Returns the fault for a request that would fail in the same way again, by the error causes: TLS that does
/// not accept the other side, or a redirection that is not followed.
#[cfg(feature = "remote")]
pub(super) fn permanent_cause(error: &(dyn std::error::Error + 'static)) -> Option<Fault> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(tls) = cause.downcast_ref::<rustls::Error>() {
            let advice = "check the host name, and that the certificate and its issuer are trusted here";
            let refused =
                || Fault::is_final(ErrorKind::PermissionDenied, format!("TLS is refused: {tls}; {advice}"));
            return is_refusal(tls).then(refused);
        }
        // An address that allows no request mostly comes from a redirection, too.
        if cause
            .downcast_ref::<reqwest::Error>()
            .is_some_and(|error| error.is_redirect() || error.is_builder())
        {
            let advice = "redirections end after ten, and never lead from https to http";
            return Some(Fault::is_final(ErrorKind::Other, format!("{}; {advice}", short_reason(error))));
        }
        // An I/O error's `source` skips its direct cause.
        let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = inner.map_or_else(|| cause.source(), |inner| Some(inner));
    }
    None
}

#[cfg(not(feature = "remote"))]
pub(super) fn permanent_cause(_error: &(dyn std::error::Error + 'static)) -> Option<Fault> {
    None
}

/// Returns whether a TLS side rejects its peer, and will do so again.
#[cfg(feature = "remote")]
fn is_refusal(error: &rustls::Error) -> bool {
    use rustls::{AlertDescription as Alert, Error as Tls, InvalidMessage};
    match error {
        Tls::InvalidCertificate(_)
        | Tls::InvalidCertRevocationList(_)
        | Tls::NoCertificatesPresented
        | Tls::UnsupportedNameType
        | Tls::PeerIncompatible(_)
        // A server that does not speak TLS.
        | Tls::InvalidMessage(InvalidMessage::InvalidContentType) => true,
        Tls::AlertReceived(alert) => matches!(
            alert,
            Alert::HandshakeFailure
                | Alert::ProtocolVersion
                | Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::CertificateRequired
                | Alert::UnknownCA
                | Alert::AccessDenied
                | Alert::InsufficientSecurity
                | Alert::UnrecognisedName
        ),
        _ => false,
    }
}

/// Classifies the error from an unobserved request: a listing, a write, or an operation without network.
pub(super) fn unwatched(error: &object_store::Error, store: StoreKind) -> Fault {
    if let Some(permanent) = permanent_cause(error) {
        return permanent;
    }
    match error {
        object_store::Error::Generic { .. } => Fault::transient(short_reason(error)),
        _ => unsent(error, short_reason(error), store),
    }
}

fn unsent(error: &object_store::Error, reason: String, store: StoreKind) -> Fault {
    use object_store::Error as Store;
    match error {
        // Requests to registered stores are not observed: they may have been sent.
        Store::Generic { .. } if store == StoreKind::Registered => Fault::transient(reason),
        Store::Generic { .. } => Fault::Unsent { reason: format!("{reason}; {}", store.credentials_hint()) },
        Store::NotFound { .. } => Fault::is_final(ErrorKind::NotFound, reason),
        Store::Precondition { .. } => replaced(),
        Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => {
            Fault::is_final(ErrorKind::PermissionDenied, format!("{reason}; {}", store.credentials_hint()))
        }
        _ => Fault::is_final(ErrorKind::Other, reason),
    }
}

/// Returns the fault for an object that was replaced.
pub(super) fn replaced() -> Fault {
    other_version("the server has another version")
}

/// Returns the fault for an object that was replaced, with the observed difference.
pub(super) fn other_version(difference: &str) -> Fault {
    let reason = format!(
        "the object was replaced while it was read ({difference}); leave shards in place and index them again"
    );
    Fault::is_final(ErrorKind::InvalidData, reason)
}

/// Returns an error with its causes, without credentials, and shortened, because a server may send a whole
/// page.
pub(super) fn short_reason(error: &dyn std::error::Error) -> String {
    const CHARACTERS_MAX: usize = 400;
    let reason = crate::error::error_reason(error);
    let line = redact(&reason).split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(CHARACTERS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Returns whether the error is that of a missing object.
pub(super) fn is_missing(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound
}

#[cfg(all(test, feature = "remote"))]
mod tests {
    use rustls::{CertificateError, Error as Tls};

    use super::*;

    /// Error from a store whose connection fails in TLS.
    fn failed(tls: Tls) -> object_store::Error {
        let connection = io::Error::other(io::Error::new(ErrorKind::InvalidData, tls));
        object_store::Error::Generic { store: "S3", source: Box::new(connection) }
    }

    #[test]
    fn a_certificate_that_is_refused_is_final_and_a_broken_connection_is_not() {
        let sent = Notes { is_sent: true, ..Notes::default() };
        let refused = failed(Tls::InvalidCertificate(CertificateError::UnknownIssuer));
        for fault in [store_fault(&refused, sent, StoreKind::S3), unwatched(&refused, StoreKind::S3)] {
            let Fault::Final { reason, .. } = fault else { panic!("{fault:?}") };
            assert!(reason.starts_with("TLS is refused") && reason.contains("certificate"), "{reason}");
        }
        let broken = failed(Tls::DecryptError);
        assert!(matches!(store_fault(&broken, sent, StoreKind::S3), Fault::Transient { .. }));
    }
}
