//! etcd users with restricted permissions.

use etcd_client::{GetOptions, Permission, UserAddOptions};

use crate::etcd::prefix_end;
use crate::{CoordError, Etcd};

/// etcd's role with all permissions.
const ROOT: &str = "root";

/// No user of etcd has this name.
const UNKNOWN: &str = "steadfast-unknown";

/// The permissions of a user. Users have no password: etcd takes the name from the common name of the
/// client certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub user: String,
    /// The role in etcd; created if it does not exist.
    pub role: String,
    /// Key prefixes that the user may read.
    pub reads: Vec<String>,
    /// Keys that the user may read and write; prefixes if they end in `/`.
    pub writes: Vec<String>,
}

impl Etcd {
    /// Creates a user with these permissions. An existing user keeps those it has.
    ///
    /// # Errors
    /// If etcd does not answer, or authentication is on and this client lacks permission to create
    /// users.
    pub async fn allow(&self, grant: &Grant) -> Result<(), CoordError> {
        let (user, role) = (grant.user.as_str(), grant.role.as_str());
        self.add_role(role).await?;
        let reads = grant.reads.iter().map(|key| Permission::read(key.as_str()).with_prefix());
        let writes = grant.writes.iter().map(|key| {
            let permission = Permission::read_write(key.as_str());
            if key.ends_with('/') { permission.with_prefix() } else { permission }
        });
        for permission in reads.chain(writes) {
            let give = || {
                let (mut client, permission) = (self.client(), permission.clone());
                async move { client.role_grant_permission(role, permission).await }
            };
            self.call("role grant", give).await?;
        }
        self.add_user(user, role).await
    }

    /// Creates a user with all permissions.
    ///
    /// # Errors
    /// As [`Etcd::allow`].
    pub async fn allow_all(&self, user: &str) -> Result<(), CoordError> {
        self.add_role(ROOT).await?;
        for user in [ROOT, user] {
            self.add_user(user, ROOT).await?;
        }
        Ok(())
    }

    async fn add_role(&self, role: &str) -> Result<(), CoordError> {
        let add = || {
            let mut client = self.client();
            async move { client.role_add(role).await }
        };
        is_there(self.call("role add", add).await)
    }

    /// Creates a user without a password, and grants it a role.
    async fn add_user(&self, user: &str, role: &str) -> Result<(), CoordError> {
        let add = || {
            let (mut client, keyless) = (self.client(), UserAddOptions::new().with_no_pwd());
            async move { client.user_add(user, "", Some(keyless)).await }
        };
        is_there(self.call("user add", add).await)?;
        let give = || {
            let mut client = self.client();
            async move { client.user_grant_role(user, role).await }
        };
        self.call("user grant", give).await.map(|_| ())
    }

    /// Returns whether etcd has authentication on.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn enforces_grants(&self) -> Result<bool, CoordError> {
        let log_in = || {
            let mut client = self.client().auth_client();
            async move { client.authenticate(UNKNOWN.to_owned(), String::new()).await }
        };
        match self.call("authenticate", log_in).await {
            Err(error) if error.is_transient() => Err(error),
            // It refuses an unknown user only if it has authentication on.
            Err(error) => Ok(!error.to_string().contains("not enabled")),
            Ok(_) => Ok(true),
        }
    }

    /// Returns the first key that is not below one of `prefixes`.
    ///
    /// # Errors
    /// If etcd does not answer, or refuses to list all keys.
    pub async fn key_outside(&self, prefixes: &[String]) -> Result<Option<String>, CoordError> {
        let mut from = vec![0];
        loop {
            let options = GetOptions::new().with_from_key().with_limit(1).with_keys_only();
            let found = self.read("list", &from, options).await?;
            let Some(kv) = found.kvs().first() else { return Ok(None) };
            match prefixes.iter().find(|it| kv.key().starts_with(it.as_bytes())) {
                Some(prefix) => from = prefix_end(prefix.as_bytes()),
                None => return Ok(Some(String::from_utf8_lossy(kv.key()).into_owned())),
            }
            // Nothing follows the last prefix.
            if from == [0] {
                return Ok(None);
            }
        }
    }

    /// Enables authentication in etcd.
    ///
    /// # Errors
    /// If etcd does not answer, or has no user with the role `root`.
    pub async fn enforce_grants(&self) -> Result<(), CoordError> {
        let enable = || {
            let mut client = self.client();
            async move { client.auth_enable().await }
        };
        self.call("auth enable", enable).await.map(|_| ())
    }
}

/// Treats "already exists" as success.
fn is_there<T>(made: Result<T, CoordError>) -> Result<(), CoordError> {
    match made {
        Ok(_) => Ok(()),
        Err(error) if error.to_string().contains("already exists") => Ok(()),
        Err(error) => Err(error),
    }
}
